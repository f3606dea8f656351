"""Kernels for layers with recurrent state. The float32 reference is in `attn_ops/scans/`.

In: rows of tokens, the slots of their states. Out: rows, and the states in their slots.
Change: the contract: `base.py`; which one is used: `backends/selection/scans.py`.
Change: our kernels: `triton/`; third-party: `fla.py`, `flashinfer.py`; plain PyTorch: `plain_torch.py`.
"""
