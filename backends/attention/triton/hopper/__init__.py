"""Prefill in 16 bits on Hopper, written in Gluon.

In: a `WorkPartition` and one layer's tensors. Out: the layer's output rows.
Change: the launch and its warpgroups: `kernel.py`; copies of pages to shared memory: `producer.py`; products and sums: `consumer.py`.
Change: tiles whose width is not a power of two: `parts.py`.
"""
