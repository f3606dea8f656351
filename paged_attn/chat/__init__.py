"""Chats, for `LLM.chat` and the server alike.

In: messages, tools, and a tokenizer with its chat template. Out: the text of the prompt, a grammar for calls that are enforced, and a
reader that takes answers apart. `request.py` assembles it.
Change: what is checked: `messages.py`, `tools.py`, `errors.py`; the template: `template.py`; the grammar: `forced_calls.py`.
Change: how answers are read: `answers/`, into `parts.py`; tags: `marks.py`; how models write calls: `formats/`.
Change: what callers get: `completion.py`; several conversations: `several.py`.
"""
