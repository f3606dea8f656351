"""Hugging Face models without torch.compile: `patch.py` hooks their attention, `cache.py` gives their
`generate` paged KV.
"""
