"""Latent attention: one row per token in the pool, and two ways to attend to it.

In: a `LatentCall` and the step's context. Out: the layer's output rows. `step.py` stores the rows and deals the
requests to the way that is cheaper: queries are mapped to the latent and the backend attends to the rows, or keys and
values are made of the rows, some at a time. Those go to PyTorch's attention (`expanded.py`) or to the backend's own
kernel (`paged.py`).
"""
