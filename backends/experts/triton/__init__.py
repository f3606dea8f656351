"""Experts in Triton: `few.py` for as many tokens as decode steps have, `grouped.py` for more. In and out: as the op.

Few tokens: each chosen expert's rows are read at the pace of memory, nothing is sorted. Many: rows are sorted by expert and padded to
blocks (`sort_kernel.py`), and two grouped products run over the blocks: those of `grouped_kernel.py` anywhere, and for prompts on
Hopper those of `hopper_kernel.py`, if `hopper.py` can describe the weights to TMA.
"""
