"""One step as one ragged row of tokens: `Batch` in `batch.py`, what it is refused for, and its buffers of
fixed size for captured graphs.

In: requests as columns of integers. Out: host and device tensors that ops, backends and graphs read.
"""
