"""FX rewrites of a Dynamo graph, one per file, in the order that `runner.py` gives."""
