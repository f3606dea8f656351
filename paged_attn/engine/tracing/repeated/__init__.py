"""Traces only two of the layers that are alike, because Dynamo takes a third of a second for each.

In: a model. Out: the graph that a trace of all layers would give.
Change: candidates: `find.py`; the proof that they are alike: `same_code.py`; where a layer begins and ends: `marks.py`.
Change: the copies: `expand.py`, `traced_layer.py`.
"""
