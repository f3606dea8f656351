"""The routes.

In: bodies. Out: answers, whole or streamed.
Change: OpenAI's routes: `routes.py`; fields: `bodies.py`, of chats: `chat_body.py`; checks of single fields: `fields/`.
Change: /v1/responses: `responses/`; /v1/messages: `messages/`.
Change: answers: `replies.py`; what routes share: `request_state.py`.
Change: embeddings and scores: `pooling_routes.py`; adapters: `lora_routes.py`; tokens: `token_routes.py`; /health, /metrics: `health.py`;
/docs: `docs_page.py`.
"""
