"""Chats, for `LLM.chat` and the server alike. In: messages, tools, and a tokenizer with its chat template. Out: the text of
the prompt, a grammar for calls that are enforced, and a reader that takes answers apart.

`request.py` puts it together: `messages.py` and `tools.py` check what is given, `template.py` renders it, `forced_calls.py`
writes the grammar. How answers are read: `answers/`; how models write calls: `formats/`.
"""
