"""The ops of the `paged_attn` namespace, one file per kind: what a rewritten graph calls.

In: tensors of one layer. Out: results in `output`; batch, pools and plan come from the thread's forward context.
Change: an op: the file of its kind (of linear layers: `linears/`); how ops are registered: `define.py`.
Change: what may be done with an op's graph: `kinds.py`.
"""
