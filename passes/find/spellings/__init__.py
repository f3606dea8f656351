"""Brings attention that is spelled in other ways into the spelling that `passes/find/softmax.py` searches for.

In: a graph. Out: the same graph with other nodes around the scores and weights, and the same numbers up to rounding.
Change: flex_attention: `decompose_flex.py`; other orders of the dims: `score_layout.py`, `flattened_rows.py`.
Change: scores that are a sum of products: `summed_products.py`; weights of several softmaxes: `combined_weights.py`.
Change: values that go through a buffer of the model's own: `own_buffers.py`.
"""
