"""Hugging Face's own `generate` after `model.compile(backend="paged_attn")`. In: the calls that `generate` makes of the model. Out: their
logits, from an engine's steps. `install.py` puts itself before a model's calls at the first one, `compiled_calls.py` decides which of them
run on pages, `call_rows.py` reads a call, `ragged_cache.py` is the cache that `generate` holds, `ragged_table.py` its pages, `row_steps.py`
cuts a call into steps; `refusal.py` remembers why there is no engine, and `leave_pages.py` goes on without pages.
"""
