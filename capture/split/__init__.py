"""A graph cut before AOT at registered ops: `split_graph.py`; which ops: `split_ops.py`. Equal pieces have
equal fingerprints.
"""
