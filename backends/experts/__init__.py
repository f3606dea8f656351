"""Kernels for experts behind one contract, `base.py`.

In: tokens, the experts chosen for each, stacked weights and a `Gating`. Out: their weighted sum.
Change: our kernels: `triton/`; third-party: `flashinfer.py`, `grouped_mm.py`, `sgl_kernel/`; the reference for all:
`one_by_one.py`.
Change: which exist, and which one is used: `backends/selection/experts.py`; a new one is a file here and a line there.
"""
