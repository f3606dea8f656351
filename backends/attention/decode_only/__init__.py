"""Decode-only backends, which need another backend for prefill; FlashInfer's are in its own room.

In: a plan of one decode step and one layer's tensors. Out: the layer's output rows.
Change: what they share: `base.py`; FlashMLA: `flash_mla.py`; CUTLASS's kernel for latents: `cutlass_mla.py`.
"""
