"""Layers that keep recurrent state (state-space, linear attention, short convolution).

In: a model. Out: `RecurrentLayer`s, found by running the model, and during a trace the ops that replace them: on slots of a
pool where that is proved, else one op for each layer.
Change: which layers are found: `discover.py`, `watching/`; which have ops: `as_ops/`; what is known about a layer: `layer.py`.
Change: which kinds of calls are trusted: `verify.py`, `long_chunks.py`; which are alike: `same_kind.py`; the states of a step: `run.py`.
Change: layers that write their recurrence inline: `inline/`; programs of ops: `program.py`; twins of 16-bit layers: `in_float32.py`.
Change: what a cache holds: `cache_state.py`.
Change: states of a custom engine: `states.py`; layers in captured decode steps: `in_graphs.py`.
"""
