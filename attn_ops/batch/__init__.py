"""One step as one ragged row of tokens: `Batch` in `batch.py`, what it is refused for, its buffers of
fixed size for captured graphs, and some of its requests as a batch of their own (`part.py`).

In: requests as columns of integers. Out: host and device tensors that ops, backends and graphs read.
"""
