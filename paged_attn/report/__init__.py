"""What `explain` and `attention_layers` report.

In: a compiled model, an engine or an `LLM`. Out: `Explanation`, as data and as text.
Change: how a model is inspected: `inspection.py`; what is reported: `explanation.py`.
Change: tables of backends, for `backends` and docs: `backend_matrix.py`.
"""
