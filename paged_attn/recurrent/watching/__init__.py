"""Where a model keeps state, seen by running it on two lengths: what has one size for both is state.

In: a model. Out: calls of its modules, and what state they keep.
Change: state in the cache: `watch.py`; that a module is given and gives back: `carried.py`; in attributes: `attributes.py`.
Change: what else a module is given: `call_parts.py`.
"""
