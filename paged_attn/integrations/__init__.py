"""Adapters for other programs: their model class on top of our `LLM`.

In: their calls. Out: their answers. One file per program, each with the extra of the same name.
Change: lm-evaluation-harness: `lm_eval.py`.
"""
