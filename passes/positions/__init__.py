"""Makes values that a model derives from the number of tokens functions of the batch's positions, proved on ragged rows.

In: a graph whose attention was replaced. Out: the same for ragged rows, and how many positions the model has.
Change: the passes and their order, lookups: `own_positions.py`; values by row: `ragged_values.py`, `row_replacement.py`, tried by
`row_probe.py`; values derived from ids: `id_values.py`; the positions' node: `batch_positions.py`.
Change: whether rows are independent: `independent_rows.py`, at which distances: `distances.py`.
"""
