"""Applies each row's low-rank adapter on a GPU.

In: rows, the factors of all adapters, and each row's slot. Out: the rows plus their adapters' contribution. Called by `paged_attn::lora`.
Change: the two kernels: `kernels.py`; the second half alone: `up_kernel.py`; launches and launch parameters: `on_gpu.py`.
"""
