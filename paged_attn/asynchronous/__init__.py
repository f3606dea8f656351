"""One engine for many coroutines: `AsyncLLM` (`async_llm.py`), on which the server is built.

In: prompts as token ids, texts or chats. Out: events and completions on the callers' event loops.
Change: the thread that owns the engine: `engine_thread.py`; its input: `job.py`; its reports: `snapshot.py`, `stream.py`.
Change: which requests wait and which are rejected: `job_queue.py`, for `AsyncLLM`'s callers `request_limit.py`; errors: `errors.py`.
Change: which requests a failed step ends: `failed_steps.py`; tokenizing in threads, clients taking turns: `texts.py`, `fair_pool.py`.
"""
