"""Pages and state slots of requests: taken, shared through the prefix cache, given back whatever happens.

In: requests and how many tokens each needs. Out: page ids and slots, or none where there is no room.
Change: pages taken, shared, freed: `kv_manager.py`; pages behind a layer's window: `grouped_kv.py`.
Change: prefix hits and eviction: `radix_cache.py`, `radix_node.py`.
Change: how many pages and slots fit: `budget.py`; slots of recurrent states: `request_states.py`.
Change: after which tokens states are kept for the prefix cache: `state_snapshots.py`.
"""
