"""What the self-check compares, what it allows, and whose fault a difference is.

In: both sides of `../runs/`. Out: nothing, or a refusal (`diagnosis.py`).
Change: what is allowed: `noise.py`; rows that rounding may have chosen otherwise: `suspects.py`, `exchanges.py`.
Change: ragged steps: `ragged.py`; windows: `windows.py`; positions: `long_positions.py`; later tokens: `later_tokens.py`.
Change: the trace beside the model itself: `against_model.py`.
"""
