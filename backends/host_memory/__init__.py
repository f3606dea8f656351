"""Kernels that read and write the host's pinned memory, in place of copies: a GPU idles before and after each.

In: a step's integers in pinned memory, and the tokens that the step before chose; tensors that the host waits for.
Out: the step where captured graphs read it; copies on the host.
Change: a step on its way to the device: `fetch.py`, `fetch_kernel.py`; results on their way to the host: `deliver.py`, `deliver_kernel.py`.
Change: how long pinned memory is kept for kernels: `held.py`.
"""
