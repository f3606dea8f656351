"""What `explain` and `attention_layers` tell.

In: a compiled model, an engine or an `LLM`. Out: `Explanation`, as data and as text.
Change: what is asked of a model: `inspection.py`; what is told, and how: `explanation.py`.
Change: tables of backends, for `backends` and docs: `backend_matrix.py`, `backend_table.py`.
"""
