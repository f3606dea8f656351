"""Records and replays steps.

In: a callable and fixed buffers. Out: segments to replay, and for every shape without a graph the reason.
Change: all graphs of a model under a budget: `graph_set.py`; the sizes: `buckets.py`; one run as graphs and ops: `segments.py`.
Change: CUDA graphs behind an interface: `recorder.py`; whether addresses are still valid: `pointer_check.py`.
"""
