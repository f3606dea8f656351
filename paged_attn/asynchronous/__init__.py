"""One engine for many coroutines: `AsyncLLM` (`async_llm.py`), and what the server is made of.

In: prompts as token ids, texts or chats. Out: events and completions on the event loops that asked.
Change: the thread that owns the engine: `engine_thread.py`; what comes to it: `job.py`; what it reports: `snapshot.py`, `stream.py`,
`status.py`.
Change: which requests wait and which are rejected: `job_queue.py`, for `AsyncLLM`'s callers `request_limit.py`; errors: `errors.py`.
Change: which requests a failed step ends: `failed_steps.py`; tokenizing in threads, by turns: `texts.py`, `fair_pool.py`.
"""
