"""The memory of requests: pages of K and V, slots of recurrent state, and the radix tree of prefixes that are
shared.

In: specs and a device. Out: page ids and slots for a batch. What evicts first is `eviction.py`; what must
hold at all times `radix_invariants.py`; which layers have a page table of their own `layer_groups.py`.
"""
