"""Tensor and expert parallel: one model over several processes, each with its own heads, and slices of experts or whole
ones. The processes are torchrun's (`torchrun.py`), the shards transformers' (`shard.py`, which comes first);
`ranks.py` is what the engine asks, and `own_experts.py` whole experts.
"""
