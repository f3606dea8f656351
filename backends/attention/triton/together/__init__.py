"""Decode steps whose requests share their first pages: adjacent requests that share pages form one work item, with one tile of queries.

In: the step's page tables, and one layer's tensors. Out: the layer's output rows.
Shared pages are read once, then each request's own pages; requests that share nothing are separate items.
Change: who shares what, found on the device, so that a captured step serves both: `plan_kernels.py`; the kernel: `attend_kernel.py`.
"""
