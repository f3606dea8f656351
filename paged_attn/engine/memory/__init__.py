"""Pages and state slots of requests: allocated, shared through the prefix cache, and always freed.

In: requests and how many tokens each needs. Out: page ids and slots, or none if there is no room.
Change: how pages are allocated, shared and freed: `kv_manager.py`; frames behind a layer's window: `grouped_kv.py`.
Change: prefix hits and eviction: `radix_cache.py`, `radix_node.py`.
Change: how many pages and slots fit: `budget.py`; slots of recurrent states: `request_states.py`.
Change: after which tokens states are kept for the prefix cache: `state_snapshots.py`.
"""
