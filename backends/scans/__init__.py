"""Kernels for layers with recurrent state: `triton/` for any GPU, and what others have (`fla.py`, `flashinfer.py`). The float32
truth is in `attn_ops/scans/`.

In: rows of tokens, the slots of their states. Out: rows, and the states in their slots. `base.py` is the contract; who is taken is
said in `backends/selection/scans.py`.
"""
