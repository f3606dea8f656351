"""Matrix products for a single row (GEMV), limited only by reading the weight.

In: one row and a weight. Out: one row. Called by `paged_attn::linear`.
Change: which products it handles, and launch parameters: `gemv.py`; the kernel: `gemv_kernel.py`.
"""
