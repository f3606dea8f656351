"""Recurrences over the tokens of packed requests, in float32 and without a loop over tokens: what the ops in `ops/scans.py` compute.

In: rows of tokens, and a pool's states [slots, ...] of one layer. Out: rows, and the states after them. `state_rows.py` says which rows
belong to which slot, `segments.py` which states are kept on the way, `chunks.py` cuts requests into chunks; one file for each recurrence.
"""
