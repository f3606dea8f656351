"""Chats, for `LLM.chat` and the server alike.

In: messages, tools, and a tokenizer with its chat template. Out: the prompt's text, a grammar if calls are enforced, and a
parser of answers. `request.py` assembles them.
Change: what is checked: `messages.py`, `tools.py`, `errors.py`; the template: `template.py`; the grammar of calls: `request.py`.
Change: how answers are parsed: `answers/`, into `parts.py`; tags: `marks.py`; tool-call formats: `formats/`.
Change: several conversations, and what callers receive: `several.py`.
"""
