"""Selects the backend that runs a model.

In: specs, device, dtype, page size. Out: a backend, or the reason why each was refused.
Change: the selection: `select.py`; what a model requires: `requirements.py`; the order: `ranking.py`, measured: `tuned.py`.
Change: which backends there are: `registry.py`; optional packages: `packages.py`.
Change: experts: `experts.py`; scans: `scans.py`; both: `by_name.py`. Tables of all of them: `paged_attn/report/backend_matrix.py`.
"""
