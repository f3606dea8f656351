"""Matrix products for a single row (GEMV), limited only by reading the weight; and norms in front of products.

In: one row and a weight. Out: one row. Called by `paged_attn::linear`; norms, of any number of rows, by `paged_attn::add_norm_linear`.
Change: which products it handles, and launch parameters: `gemv.py`; the kernel: `gemv_kernel.py`.
Change: residual addition and norm, alone or within a product: `add_norm.py`; the kernels: `add_norm_kernel.py`.
"""
