"""Pages and state slots of requests: taken, shared through the prefix cache, given back whatever happens; and
how many fit. `grouped_kv.py` gives back what lies behind windows; `state_snapshots.py` says after which tokens
recurrent states are kept.
"""
