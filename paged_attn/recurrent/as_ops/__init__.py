"""Recurrent layers whose functions are ops on slots of the state pool.

In: the layers that were found. Out: the same with `ops`, proved numerically, and forwards that emit them while torch.compile traces.
Change: a function that other layers call by name: `functions.py`; the proof: `by_ops.py`; how ops take their places: `wrap.py`.
Change: another dtype of what is kept: `state_dtype.py`.
"""
