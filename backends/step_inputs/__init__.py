"""Brings the numbers of a step to the device.

In: a step's integers in pinned memory, and the tokens that the step before chose. Out: both where captured graphs read them.
Change: the launch, and how long pinned memory is kept: `fetch.py`; the kernel: `fetch_kernel.py`.
"""
