"""What one Dynamo graph became: rewritten, split, compiled (`rewritten_graph.py`), with its inputs by role.
`compiled_graph.py` beside this room runs it.
"""
