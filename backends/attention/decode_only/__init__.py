"""Backends that decode, and of which others prefill in front; FlashInfer's of this kind are in its own room.

In: a plan of one decode step and one layer's tensors. Out: the layer's output rows.
Change: what they share: `base.py`; FlashMLA: `flash_mla.py`; CUTLASS's kernel for latents: `cutlass_mla.py`.
"""
