"""Recurrences over the tokens of packed requests, in float32 and without a loop over tokens: what the ops in `../ops/scans.py` compute.

In: rows of tokens, and a pool's states [slots, ...] of one layer. Out: rows, and the states after them.
Change: a recurrence: the file of its name; which rows belong to which slot: `state_rows.py`.
Change: how requests are cut into chunks: `chunks.py`; which intermediate states are kept: `state_segments.py`.
"""
