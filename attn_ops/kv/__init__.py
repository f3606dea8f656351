"""The memory of requests: pages of K and V, and slots of recurrent state.

In: specs and a device. Out: page ids and slots for a batch.
Change: the layout of KV in memory: `kv_pool.py`; pages: `page_allocator.py`; state slots: `state_pool.py`.
Change: which layers have their own page table: `layer_groups.py`; their pages: `GroupedAllocator` in `page_allocator.py`.
"""
