"""Kernels for experts: `triton/` for any GPU. The float32 truth is `experts_one_by_one` in `attn_ops/ops/experts.py`.

In: tokens, the experts chosen for each, stacked weights and a `Gating`. Out: their weighted sum.
"""
