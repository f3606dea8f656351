"""Backends of which others prefill in front: `base.py` is what they share; FlashMLA and CUTLASS's kernels attend to rows of latents.

In: a plan of one decode step and one layer's tensors. Out: the layer's output rows. FlashInfer's of this kind are in its own room.
"""
