"""Layers that keep recurrent state (state-space, linear attention, short convolution).

In: a model. Out: `RecurrentLayer`s, found by running the model, and during a trace ops in their places: on slots of a pool
where that is proved, else one op for each layer.
Change: which layers are found: `discover.py`, `watching/`; which have ops: `as_ops/`; what is known of a layer: `layer.py`.
Change: which kinds of calls of a layer are verified: `verify.py`; the states of a step: `run.py`; what a cache holds: `cache_state.py`.
Change: states of a custom engine: `states.py`; layers in captured decode steps: `in_graphs.py`.
"""
