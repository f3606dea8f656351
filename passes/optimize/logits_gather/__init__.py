"""Early logits gather: rows whose logits are not wanted are dropped as early in the graph as can be proved.

In: a paged graph that returns all logits. Out: one that computes only the wanted rows from there on.
Change: the pass: `gather.py`; the region and its proof: `row_region.py`, `gathered_region.py`; which ops keep rows apart: `row_ops.py`.
"""
