"""Matrix products for a single row (GEMV), as fast as the weight can be read.

In: one row and a weight. Out: one row. Called by `paged_attn::linear`.
Change: which products it takes, and launch numbers: `gemv.py`; the kernel: `gemv_kernel.py`.
"""
