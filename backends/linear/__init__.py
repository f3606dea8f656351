"""Matrix products for a single row (GEMV), at the speed of reading the weight.

In: one row and a weight. Out: one row. Called by `paged_attn::linear`.
Change: which products it takes, and launch parameters: `gemv.py`; the kernel: `gemv_kernel.py`.
"""
