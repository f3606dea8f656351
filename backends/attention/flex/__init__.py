"""PyTorch's flex_attention behind the contract.

In: a step's batch and one layer's tensors. Out: the layer's output rows.
Change: masks, windows and biases: `mods.py`; the layout of queries and keys: `step.py`; the backend itself: `backend.py`.
"""
