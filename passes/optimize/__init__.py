"""Passes that make a paged graph faster, each in its own file or folder. Only `linear_float32` sums in another order.

In: a graph whose attention is paged. Out: the same values in fewer or cheaper launches.
Change: rows of logits: `logits_gather.py`, `row_region.py`; linears: `linears/`; operands of scans: `scan_operands.py`,
`gated_delta_net.py`.
Change: experts and routers: `dense_experts.py`, `stacked_experts.py`, `routing.py`.
Change: complex numbers: `complex_as_real.py`; views: `late_views.py`.
"""
