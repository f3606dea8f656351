"""Kernels for layers with recurrent state: `triton/` for any GPU. The float32 truth is in `attn_ops/scans/`.

In: rows of tokens, the slots of their states. Out: rows, and the states in their slots. `on_gpu.py` says what takes whose place.
"""
