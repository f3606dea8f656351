"""What other programs bring a model in by: a class of theirs over our `LLM`.

In: their calls. Out: their answers. One file a program, each with the extra of its name.
Change: lm-evaluation-harness: `lm_eval.py`.
"""
