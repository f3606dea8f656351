"""Decode steps whose requests share their first pages: requests that follow each other in the batch are one item, in one tile of queries.

In: the step's page tables, and one layer's tensors. Out: the layer's output rows.
What they have in common is read once for all of them, then what each has of its own; requests that share nothing are items of their own.
Change: who shares what, found on the device, so that a captured step serves both: `plan_kernels.py`; the kernel: `attend_kernel.py`.
"""
