"""Recurrent layers whose functions are ops on slots of the state pool.

In: the layers that were found. Out: the same with `ops`, proved on numbers, and forwards that emit them while torch.compile traces.
A function that other layers call by name: `functions.py`. Another dtype of what is kept: `state_dtype.py`.
"""
