"""The routes: bodies in, answers out, whole or streamed (`replies.py`; `completion_reply.py` for completions,
`responses/` for /v1/responses). `routes.py` has OpenAI's, `token_routes.py` and `health.py` the others, `docs_page.py`
shows them all.
"""
