"""Storing a step's new K and V, or rows of latents, in the pool.

In: rows and their slots. Out: the pool's pages, written.
Change: what backends call that have no kernel of their own for it: `store.py`; our kernels: `kernels.py`, launched by `launch.py`.
"""
