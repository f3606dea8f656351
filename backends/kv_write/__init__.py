"""Stores a step's new K and V, or rows of latents, in the pool.

In: rows and their slots. Out: the rows in the pool's pages.
Change: for backends without their own write kernel: `store.py`; our kernels: `kernels.py`, launched by `launch.py`.
"""
