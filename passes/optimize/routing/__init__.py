"""What stands between a router's logits and its experts becomes one op.

In: a graph with `paged_attn::experts`. Out: the same numbers by `paged_attn::route`. `region.py` finds the operations, `proof.py` tries on
numbers which `Routing` they are, `fuse.py` replaces them.
"""
