"""Kernels for experts behind one contract, `base.py`; `backends/selection/experts.py` says which there are and takes one.

In: tokens, the experts chosen for each, stacked weights and a `Gating`. Out: their weighted sum. `triton/` is our own;
`one_by_one.py` is the truth that the others are compared with. A new one is a file here and a line there.
"""
