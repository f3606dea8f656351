"""Hugging Face's own `generate` after `model.compile(backend="paged_attn")`.

In: the calls that `generate` makes of the model. Out: their logits, from an engine's steps.
Change: where a model's calls are intercepted: `install.py`; which run on pages, and why not: `paged_calls.py`.
Change: a call as rows and steps: `call_rows.py`; the cache object that `generate` sees, and its pages: `ragged_cache.py`.
"""
