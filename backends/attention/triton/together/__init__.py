"""Decode steps whose requests share their first pages: a tile has the queries of several requests that follow each other in the batch.

What they have in common is read once for all of them, then what each has of its own, in which the others' rows are masked.
`plan_kernels.py` finds on the device what a tile shares, so that nothing else knows of it; `attend_kernel.py` computes.
"""
