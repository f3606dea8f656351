"""Layers that are alike are traced twice, and not as often as there are: Dynamo takes a third of a second for each.

In: a model. Out: the graph that a trace of all layers gives. `find.py` groups layers, `marks.py` lets a trace show where one begins and
ends, `same_code.py` proves that all that Dynamo read of one is the same in the others, `expand.py` puts copies in their places.
"""
