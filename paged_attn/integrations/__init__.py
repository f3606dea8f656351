"""What other programs bring a model in by: a class of theirs over our `LLM`. One file a program, each with the extra of its name.

`lm_eval.py`: lm-evaluation-harness.
"""
