"""Who is let in, who waits, and who is turned away. In: jobs of other threads, and what the engine says of its queue. Out: jobs for the
engine's thread, or the error that a client gets.

`job_queue.py`: jobs that the engine does not have yet, and the limit of those that wait. `waiting_jobs.py`: which of them have waited
for too long, or make room for other tenants. `request_limit.py`: the same limit where callers wait instead (`AsyncLLM`).
"""
