"""Layers that keep recurrent state (state-space, linear attention, short convolution): found by running the
model; what they do with it runs by ops on slots of a pool where that is proved, else each layer by one op.

In: a model. Out: `RecurrentLayer`s, and for the time of a trace ops in their places. `discover.py` finds them, `watching/` sees where state
is, `as_ops/` proves ops and knows the functions that have one, `run.py` holds the states of a step, `states.py` those of an engine of
one's own; `in_graphs.py` says which layers a captured decode step may hold.
"""
