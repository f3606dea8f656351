"""Turns blocks that loop over their experts, or compute them in other ways, into ops while a model is traced.

In: a model. Out: blocks that run their own operations around `paged_attn::experts`, which takes their experts' weights stacked.
Change: which blocks: `as_ops.py`; what one expert computes: `expert_mlp.py`; how they are called: `calls.py`.
Change: experts that are no modules: `stacked_pair.py`, `product_weights.py`, `one_hot_products.py`.
Change: recording a block's operations: `tape.py`; as a graph for any number of tokens: `common_steps.py`, `program.py`.
Change: where the experts' sum is, and the proof: `prove.py`.
"""
