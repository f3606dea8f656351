"""Early logits gather: drops rows whose logits are not wanted, as early in the graph as can be proved correct.

In: a paged graph that returns all logits. Out: one that computes only the wanted rows from there on.
Change: the pass, and the proof on random rows: `gather.py`; the region, and which ops keep rows apart: `row_region.py`.
"""
