"""What the self-check compares, what it allows, and which part causes a difference.

In: both sides of `../runs/`. Out: nothing, or a refusal (`diagnosis.py`).
Change: what is allowed: `noise.py`; rows in which rounding may have changed a choice: `suspects.py`.
Change: ragged steps: `ragged.py`; windows: `windows.py`; positions: `long_positions.py`; later tokens: `later_tokens.py`.
Change: the trace against the model itself: `against_model.py`; models that overflow by themselves: `overflow.py`.
"""
