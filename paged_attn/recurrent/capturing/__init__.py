"""Which layers that run by their own forward a captured decode step may hold.

In: verified layers. Out: the same, with `why_not_in_graphs`. `in_graphs.py` tries them; `launches.py` compares what two calls launch.
"""
