"""Recompute attention: attention that no spec describes, such as one whose mask depends on hidden states or that mixes heads.

In: an attention that was found and not proved. Out: an op that evaluates its part of the graph on all tokens of each request.
Change: which part, and values that mix tokens: `region.py`; the op: `replace.py`.
Change: the program and its proof: `program.py`; on how many tokens it is tried: `code_numbers.py`.
Change: how few tokens it needs: `reach.py`, `other_weights.py`; what is an op of its own, as it mixes rows of a few: `nearby.py`.
"""
