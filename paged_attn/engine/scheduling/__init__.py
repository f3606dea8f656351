"""Which tokens of which requests the next step computes: `scheduler.py` first; queues, policies and fairness
around it.
"""
