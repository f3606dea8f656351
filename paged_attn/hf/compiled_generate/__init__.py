"""Hugging Face's own `generate` after `model.compile(backend="paged_attn")`. In: the calls that `generate` makes of the model. Out: their
logits, from an engine's steps. `install.py` puts itself before a model's calls at the first one, `paged_calls.py` decides which of them
run on pages and remembers why there is no engine, `call_rows.py` reads a call and cuts it into steps, `ragged_cache.py` is the cache that
`generate` holds, and goes on without pages, `ragged_table.py` its pages.
"""
