"""Kernels that choose tokens.

In: logits, and `SamplingTensors` of rows that are not greedy. Out: a token of each row. Called by `paged_attn/engine/sampling/`.
Change: the most likely token: `greedy.py`, `greedy_kernel.py`; sampled tokens (top-k, top-p, min-p): `sample.py`, `sample_kernel.py`.
Change: the settings they read: `sampling_tensors.py`.
"""
