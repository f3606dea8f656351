"""Latent attention: one row per token in the pool, and two ways to attend to it.

In: a `LatentCall` and the step's context. Out: the layer's output rows. `step.py` stores the rows and deals the
requests to the two ways; `choose.py` says which is cheaper; `absorbed.py` maps queries to the latent and lets
the backend attend to the rows; `expanded.py` makes keys and values of the rows, some at a time. Those go to
PyTorch's attention (`fresh.py`, `expanded.py`) or, by `paged.py` and `paged_parts.py`, to the backend's own kernel.
"""
