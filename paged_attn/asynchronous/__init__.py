"""One engine for many coroutines: `AsyncLLM`, and what the server is made of. In: prompts as token ids, texts or chats. Out: events and
completions on the event loops that asked.

`async_llm.py` is the face. `engine_thread.py` owns the engine: jobs (`job.py`) and cancels come to it through queues, `job_queue.py` says
who waits and who is turned away (`request_limit.py` lets `AsyncLLM`'s callers wait instead), `failed_steps.py` whose requests a step that
raised ends. `texts.py` tokenizes in threads, where clients take turns (`fair_pool.py`).
"""
