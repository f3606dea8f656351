"""POST /v1/messages and /v1/messages/count_tokens.

In: a body of Anthropic's Messages API. Out: an ordinary chat, and its answer as blocks and events.
Change: fields of the body: `body.py`; blocks of its messages: `conversation.py`; blocks and events of the answer: `reply.py`.
Change: the form of errors: `paged_attn/server/http/errors.py`.
"""
