"""Kernels for layers with recurrent state. The float32 truth is in `attn_ops/scans/`.

In: rows of tokens, the slots of their states. Out: rows, and the states in their slots.
Change: the contract: `base.py`; who is taken: `backends/selection/scans.py`.
Change: our kernels: `triton/`; others': `fla.py`, `flashinfer.py`; plain PyTorch: `truth.py`.
"""
