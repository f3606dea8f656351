"""Logits to tokens, on the device, every row by its own settings: `sampler.py` first."""
