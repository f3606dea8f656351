"""Early logits gather: rows whose logits nobody asked for are dropped as early in the graph as is proved.

In: a paged graph that returns all logits. Out: one that computes the wanted rows alone from there on.
Change: the pass: `gather.py`; the region and its proof: `row_region.py`, `gathered_region.py`; which ops keep rows apart: `row_ops.py`.
"""
