"""Layers that write their recurrence inline, rather than call a function: what they do to their states is read from the graph of one token.

In: a verified layer. Out: a program for all rows of a step, with an op on slots where the layer updates and reads a state.
Change: which recurrences are known: `find/`; what states hold at first: `starts.py`.
Change: the graph of one token: `step_graph.py`; what is changed in it before it is read: `traced/`.
Change: ops in the graph: `insert.py`; the program: `make_program.py`.
Change: how the op's operands are made of the graph's tensors: `operands.py`.
"""
