"""Where a model keeps state, seen by running it on two lengths: what has one size for both is state.

In: a model. Out: calls of its modules, and what state they keep. `watch.py` looks at the cache, `carried.py` at state that a
module is given and gives back, `attributes.py` at attributes; `call_parts.py` tells what else a module is given.
"""
