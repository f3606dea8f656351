"""Answers that follow a JSON schema, a regular expression or a grammar.

In: `SamplingParams` and the tokenizer. Out: a `Guide` for each request, whose masks forbid all other tokens.
Change: masks and parsing: `guides.py`; limits on what is parsed: `trials.py`; the process that parses it on trial: `compile_process.py`.
"""
