"""The memory of requests: pages of K and V, and slots of recurrent state.

In: specs and a device. Out: page ids and slots for a batch.
Change: how KV lies in memory: `kv_pool.py`; pages: `page_allocator.py`; slots of states: `state_pool.py`.
Change: which layers have a page table of their own: `layer_groups.py`; their pages: `grouped_allocator.py`.
"""
