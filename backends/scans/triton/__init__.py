"""Kernels that find a row's state by its slot, on the device, so that a captured step may hold them.

In: what the functions of `attn_ops/scans/` take. Out: the same. `steps.py` launches those of decoding rows, `prompts.py` those
of prompts, `conv.py` the short convolution's.
"""
