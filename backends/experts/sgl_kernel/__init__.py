"""Experts with the kernels of the sgl-kernel wheel.

In: as `paged_attn::experts`. Out: the same.
Change: which products and gates are called: `backend.py`; the weighted sum, which is ours: `sum_kernel.py`.
"""
