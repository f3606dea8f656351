"""Recording and replaying steps: `recorder.py` is CUDA graphs behind an interface, `graph_set.py` all graphs
of a model under a budget.

In: a callable and fixed buffers. Out: segments to replay, and for every shape without a graph the reason.
"""
