"""Linear layers of a paged graph.

In: a graph with F.linear. Out: the graph with linears merged or replaced by ops.
Change: linears of one input: `merge.py`, `mergeable_weights.py`, `sliced_values.py`; one row: `gemv.py`; finding linears: `sites.py`.
Change: what q and k go through alike: `merge_rotations.py`.
Change: norms within products: `add_norm.py`; float32 products of 16-bit tensors: `float32_products.py`.
Change: adapters, in a variant of the graph: `lora.py`.
"""
