"""Each row's low-rank adapter on a GPU: two kernels (`kernels.py`) and how they are launched (`on_gpu.py`). Called by the op
`paged_attn::lora`.
"""
