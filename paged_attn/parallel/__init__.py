"""Tensor parallel: one model over several processes, each with its own heads. The processes are torchrun's,
the shards transformers'.
"""
