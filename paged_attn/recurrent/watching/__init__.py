"""Finds where a model keeps state by running it on two lengths: what has the same size for both is state.

In: a model. Out: calls of its modules, and what state they keep.
Change: state in the cache: `watch.py`; that a module takes and returns: `carried.py`; in attributes: `attributes.py`.
Change: a module's other arguments: `call_parts.py`, and those that it does not read: `not_read.py`.
"""
