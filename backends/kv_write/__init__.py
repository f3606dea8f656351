"""Storing a step's new K and V, or rows of latents, in the pool: `store.py` is the one way for backends that have no kernel of their
own for it, `launch.py` calls our kernels.
"""
