"""Layers that keep recurrent state (state-space, linear attention, short convolution): found by running the
model, run by one op each.
"""
