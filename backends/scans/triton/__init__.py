"""Kernels that find a row's state by its slot, on the device, so that a captured step may hold them. Start with `backend.py`.

In: what the functions of `attn_ops/scans/` take. Out: the same.
Change: decoding rows: `steps.py`, `steps_kernel.py`; prompts: `prompts.py`, `prompts_kernel.py`; the short convolution: `conv.py`,
`conv_kernel.py`.
Change: prompts of Mamba-2: `ssd.py`, `ssd_kernel.py`; of Kimi Delta Attention: `kda.py`, `kda_kernel.py`.
"""
