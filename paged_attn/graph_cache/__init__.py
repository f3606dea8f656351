"""Traced and rewritten graphs on disk, as data without code.

In: a model and its settings. Out: the graph that an earlier process traced, or none.
Change: what makes a graph valid: `graph_key` and `_changed` in `cached_graphs.py`; what a record holds: `record.py`, `graph_data.py`.
Change: which functions a graph from disk may call: `allowed_calls.py`; files: `entries.py`.
"""
