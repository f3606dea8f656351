"""What one Dynamo graph became: rewritten, split, compiled (`rewritten_graph.py`), with its inputs by role; `lora_graph.py` is
its variant with adapters. `compiled_graph.py` beside this room runs the original graph, or under a forward context this one.
"""
