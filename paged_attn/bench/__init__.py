"""`paged-attn bench`: the same prompts through this engine and its peers, each in a process of its own.

In: flags. Out: tables, JSON, a chart. `session.py` comes first; a peer is a file of `systems/`, a shape a line of `shapes.py`.
"""
