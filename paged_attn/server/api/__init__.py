"""OpenAI's routes: bodies in, answers out, whole or streamed (`replies.py`; `completion_reply.py` for completions)."""
