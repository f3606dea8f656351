"""Tensor and expert parallel: one model over several processes, each with its own heads, and slices of experts or whole
ones. The processes are torchrun's, the shards transformers'.
"""
