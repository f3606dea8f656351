"""The embedded byte-level model that `examples/train_tiny_lm.py` made."""
