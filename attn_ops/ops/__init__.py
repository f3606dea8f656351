"""The ops of the `paged_attn` namespace, one file a kind: what a rewritten graph calls.

In: tensors of one layer. Out: written into `output`, by what the thread's forward context says. `define.py`
registers them; `kinds.py` says of each what may be done with its graph.
"""
