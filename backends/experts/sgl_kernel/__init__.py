"""Experts by what the wheel of sgl-kernel brings: `matmul_ogs` of its `triton_kernels` for the products, its own kernels for the gate.

Pairs are sorted by ours, and summed up by ours (`sum_kernel.py`).
"""
