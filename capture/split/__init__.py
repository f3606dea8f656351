"""A rewritten graph cut before AOT into pieces, with the split ops between them.

In: a rewritten graph. Out: a `SplitGraph`, whose equal pieces have equal fingerprints.
Change: how it is cut: `split_graph.py`; which ops cut it: `split_ops.py`.
Change: which pieces count as equal: `fingerprint.py`; the symbolic sizes of their inputs: `symbolic_sizes.py`.
"""
