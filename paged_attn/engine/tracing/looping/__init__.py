"""Blocks that loop over a list of experts become ops while a model is traced.

In: a model. Out: blocks that compute what they wrote around `paged_attn::experts`, which takes their experts' weights
stacked. `expert_mlp.py` proves what one expert computes, `tape.py` writes down what a block does to
tensors, `common_steps.py` and `program.py` make a graph for any number of tokens of it, `prove.py` finds on numbers where the
experts' sum stands in it, and `as_ops.py`, which finds blocks, puts it in the block's place.
"""
