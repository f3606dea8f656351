"""Rows whose logits nobody asked for are dropped as early in the graph as is proved: `gather.py` is the pass."""
