"""The ops of layers with recurrent state that a model computes function by function, a file for each family.

In: rows of tokens of one layer. Out: written into `output`; the states advance in the forward context's pool. All are split ops, and may
be captured with a whole decode step: a step reads its slots on the device. `kernels.py` says what computes them.
"""
