"""Traced and rewritten graphs on disk, as data that hold no code: `cached_graphs.py` looks, `record.py` writes
and reads, `allowed_calls.py` guards.
"""
