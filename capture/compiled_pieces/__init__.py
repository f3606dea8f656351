"""Compiles pieces with Inductor, equal ones only once.

In: a split graph. Out: the same with compiled pieces, from this process or from disk.
Change: how a piece is compiled: `pieces.py`; its fake inputs: `piece_finder.py`.
Change: files on disk: `artifacts.py`; what makes one valid: `artifact_key.py`.
"""
