"""The routes: bodies in, answers out, whole or streamed (`replies.py`; `completion_reply.py` for completions,
`responses/` for /v1/responses). `routes.py` has OpenAI's, `pooling_routes.py` those of embeddings and scores, `lora_routes.py`,
`token_routes.py` and `health.py` the others, `docs_page.py` shows them all. What they share is in `request_state.py`.
"""
