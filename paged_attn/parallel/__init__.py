"""Tensor and expert parallel: one model over several processes.

In: a model that every rank has loaded whole. Out: a rank's own heads, and slices of experts or whole ones. Start with `shard.py`.
Change: what transformers' plans did: `plan.py`; what each style computes: `local_forwards.py`, `local_model.py`.
Change: sums over ranks: `collectives.py`; experts: `own_experts.py`; torchrun's processes: `torchrun.py`.
Change: what ranks must agree on: `ranks.py`.
"""
