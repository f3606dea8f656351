"""Answers that follow a JSON schema, a regular expression or a grammar.

In: `SamplingParams` and the tokenizer. Out: a `Guide` for each request, whose masks forbid all other tokens.
Change: masks, and what is read: `guides.py`; limits of what is read: `trials.py`; the process that tries it first: `compile_process.py`.
"""
