"""Traced and rewritten graphs on disk, as data that hold no code: `kept_graphs.py` looks, `record.py` writes
and reads, `allowed_calls.py` guards.
"""
