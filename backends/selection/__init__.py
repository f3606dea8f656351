"""Which backend runs a model: `select.py` decides, by `requirements.py` (what the model asks), `ranking.py` or
`tuned.py` (the order). Experts: `experts.py`, scans: `scans.py`, and what these two share: `by_name.py`.

In: specs, device, dtype, page size. Out: a backend, or a reason for every one that was refused. Tables of all of
them: `paged_attn/report/backend_matrix.py`.
"""
