"""Both sides of a check, node by node: the model as traced, and as it is served; with values seen, replaced or
moved a little on the way.
"""
