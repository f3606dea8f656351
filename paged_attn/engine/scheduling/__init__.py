"""Decides which tokens of which requests the next step computes.

In: waiting and running requests, and the free pages. Out: a `ScheduledStep`, whose pages are reserved. Start with `scheduler.py`.
Change: decodes, chunks, admission, preemption: `scheduler.py`; token budgets of a step: `step_plan.py`.
Change: policies: `queue_policy.py`; priorities and tenants' turns: `waiting_queue.py`; the order of running requests: `running_set.py`.
Change: waiting for a prefix that another request computes: `shared_prefills.py`.
"""
