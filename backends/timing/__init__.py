"""Timing backends side by side, each checked against a float32 reference first: for `paged-attn tune` and
`benchmarks/kernels.py`.
"""
