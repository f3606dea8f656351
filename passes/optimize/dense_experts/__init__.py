"""Experts that all compute every token, most of them zeros, become `paged_attn::experts`, which reads the chosen ones alone.

In: a graph, and who chooses a backend. Out: the same numbers. `region.py` finds the operations, `proof.py` tries on numbers what they are,
`replace.py` replaces them.
"""
