"""Tensor and expert parallel: one model over several processes.

In: a model that transformers or `shard.py` has sharded. Out: each rank's own modules, with all-reduces. Start with `local_model.py`.
Change: reading how transformers sharded: `plan.py`; the forward of each style: `local_forwards.py`, `local_model.py`.
Change: all-reduce, all-gather and broadcast: `collectives.py`; experts: `own_experts.py`; torchrun's processes: `torchrun.py`.
Change: what ranks must agree on: `ranks.py`; requests that reach one rank: `paged_attn/engine/lead.py` (`lead.py` is its former location).
"""
