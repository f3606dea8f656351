"""Storing a step's new K and V in the pool: `store.py` is the one way for backends that have no kernel of
their own for it, `latent.py` the one for layers of latents.
"""
