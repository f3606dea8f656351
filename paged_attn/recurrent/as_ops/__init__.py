"""Turns functions of recurrent layers into ops on slots of the state pool.

In: the layers that were found. Out: these layers with `ops`, proved numerically, and forwards that emit them in a trace.
Change: which functions become ops: `functions.py`; the proof: `by_ops.py`; how ops replace functions: `wrap.py`.
Change: the dtype of states: `state_dtype.py`.
"""
