"""Blocks that loop over a list of experts become ops while a model is traced.

In: a model. Out: blocks that compute what they wrote around `paged_attn::experts`, which takes their experts' weights stacked.
Change: which blocks: `as_ops.py`, `stacked_pair.py`; what one expert computes: `expert_mlp.py`; how blocks are called: `calls.py`.
Change: what a block does to tensors: `tape.py`; as a graph for any number of tokens: `common_steps.py`, `program.py`.
Change: where the experts' sum stands, and the proof: `prove.py`.
"""
