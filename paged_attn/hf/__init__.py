"""Hugging Face models and their `generate`.

In: a model of transformers. Out: the model hooked, with paged KV, or with a `generate` that an engine runs.
Change: the hook: `patch.py`; its masks: `mask.py`.
Change: `PagedCache`: `cache.py`, `cache_layers.py`, `cache_probe.py`; its pages: `shared_pages.py`, `shared_table.py`;
attention in place: `cache_in_place.py`; the name of the cache argument: `cache_name.py`.
Change: `custom_generate=paged_attn.generate`: `generate/`; `generate` after `model.compile(backend="paged_attn")`: `compiled_generate/`.
"""
