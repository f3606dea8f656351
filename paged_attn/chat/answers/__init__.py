"""Parses answers as they arrive.

In: text. Out: parts (`../parts.py`).
Change: which parser: `answer_form.py`; reasoning by tags: `reasoning.py`; calls: `call_splitter.py`; gpt-oss: `channels.py`.
Change: by the tokenizer's own template: `response_template.py`.
"""
