"""POST /v1/responses.

In: a body of OpenAI's Responses API. Out: an ordinary chat, and its answer as items and events.
Change: fields and items of the body: `body.py`; tools: `tools.py`; items and events of the answer: `reply.py`.
"""
