"""Decode steps whose requests share their first pages: requests that follow each other in the batch are one item, in one tile of queries.

What they have in common is read once for all of them, then what each has of its own, in which the others' rows are masked; requests that
share nothing are items of their own. `plan_kernels.py` finds on the device who shares what, so that nothing else knows of it and a captured
step serves both; `attend_kernel.py` computes.
"""
