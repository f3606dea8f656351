"""Layers that keep recurrent state (state-space, linear attention, short convolution): found by running the
model; what they do with it runs by ops on slots of a pool where that is proved, else each layer by one op.

In: a model. Out: `RecurrentLayer`s, and for the time of a trace ops in their places. `discover.py` finds them, `by_ops.py` proves ops,
`watching/` sees where state is, `functions.py` is the table of functions that have one,
`run.py` holds the states of a step.
"""
