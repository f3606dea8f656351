"""Runs both sides of a check node by node, the original and the served model; values can be read, replaced or perturbed.

In: a rewritten or hooked model, and prompts. Out: values at every boundary.
Change: where the sides are compared: `boundaries.py`; prompts and batches: `steps.py`; running a graph with taps: `tapped.py`.
Change: the original: `traced_original.py`, `truth.py`, `choices.py`; the served side: `served.py`, `traced_served.py`.
"""
