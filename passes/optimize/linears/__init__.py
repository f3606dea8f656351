"""Linear layers of a paged graph.

In: a graph with F.linear. Out: the same, merged, or with ops in their places.
Change: linears of one input: `merge.py`, `mergeable_weights.py`, `sliced_values.py`; single rows: `gemv.py`; what is a linear: `sites.py`.
Change: products in float32 of tensors in 16 bits: `float32_products.py`; adapters, in a variant of the graph: `lora.py`.
"""
