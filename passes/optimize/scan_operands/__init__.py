"""What ops on recurrent states are given: convolutions read columns of a projection where they lie (`columns.py`), delta rules read queries
and keys before they were repeated (`key_heads.py`).

Comes in: the graph with these ops. Goes out: the same ops with other operands; what only copied is dead code then.
"""
