"""Layers that are alike are traced twice, and not as often as there are: Dynamo takes a third of a second for each.

In: a model. Out: the graph that a trace of all layers gives.
Change: which layers may be alike: `find.py`; the proof that they are: `same_code.py`; where one begins and ends: `marks.py`.
Change: copies in their places: `expand.py`, `traced_layer.py`.
"""
