"""Experts in Triton, our own kernels.

In: as `paged_attn::experts`: tokens, the experts chosen for each, stacked weights, a `Gating`. Out: their weighted sum.
`backend.py` takes one of two ways. Few tokens: each chosen expert's rows are read at memory speed, nothing is sorted. Many: pairs
are sorted by expert and padded to blocks, and two grouped products run over the blocks.
Change: few tokens: `few.py`, `few_kernel.py`; many: `grouped.py`, `grouped_kernel.py`, sorted by `sort_kernel.py`; on Hopper: `hopper.py`,
`hopper_kernel.py`.
Change: the gate: `gate.py`; arguments that first products share: `arguments.py`; routing: `route.py`, `route_kernel.py`.
"""
