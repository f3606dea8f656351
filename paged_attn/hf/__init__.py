"""Hugging Face models and their `generate`. `patch.py` hooks attention without torch.compile, `cache.py` gives `generate` paged KV;
`generate/` is `custom_generate=paged_attn.generate`, `compiled/` is what `generate` runs on after `model.compile(backend="paged_attn")`.
"""
