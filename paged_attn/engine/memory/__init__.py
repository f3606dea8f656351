"""Pages and state slots of requests: taken, shared through the prefix cache, given back whatever happens; and
how many fit. `snapshot_points.py` says after which tokens recurrent states are kept.
"""
