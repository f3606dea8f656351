"""The memory of requests: pages of K and V, slots of recurrent state, and the radix tree of prefixes that are
shared.

In: specs and a device. Out: page ids and slots for a batch. What goes first is said in `radix_cache.py`; which layers have a
page table of their own `layer_groups.py`.
"""
