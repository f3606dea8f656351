"""Kernels for experts behind one contract, `base.py`.

In: tokens, the experts chosen for each, stacked weights and a `Gating`. Out: their weighted sum.
Change: our kernels: `triton/`; others': `flashinfer.py`, `grouped_mm.py`, `sgl_kernel/`; the truth that all are compared with:
`one_by_one.py`.
Change: which there are, and who is taken: `backends/selection/experts.py`; a new one is a file here and a line there.
"""
