"""Recompute attention: what no spec describes (its mask comes from hidden states, its heads are mixed).

In: an attention that was found and not proved. Out: an op that evaluates its part of the graph anew on all tokens of a request.
Change: which part: `region.py`; values that mix tokens: `mixing.py`; the program and its proof: `program.py`; the op: `replace.py`.
"""
