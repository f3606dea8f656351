"""Latent attention: one row per token in the pool, and two ways to attend to it.

In: a `LatentCall` and the step's context. Out: the layer's output rows.
Change: which way is cheaper: `step.py`, which divides the requests. Absorbed: the backend attends to the rows.
Change: expanded (keys and values are computed from the rows, some at a time): by PyTorch's attention `expanded.py`, by the backend's own
kernel `paged.py`.
"""
