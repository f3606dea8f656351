"""Kernels that look up a row's state by its slot on the device, so captured steps can contain them. Start with `backend.py`.

In: as the functions of `attn_ops/scans/`. Out: the same.
Change: decoding rows: `steps.py`, `steps_kernel.py`; prompts: `prompts.py`, `prompts_kernel.py`; the short convolution: `conv.py`,
`conv_kernel.py`.
Change: prompts of Mamba-2: `ssd.py`, `ssd_kernel.py`; the kernels of Kimi Delta Attention: `kda_kernel.py`.
Change: gates and norm of Gated DeltaNet: `net.py`, `net_kernel.py`.
"""
