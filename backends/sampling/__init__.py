"""Kernels that choose tokens, and compute their log-probabilities.

In: logits, and `SamplingTensors` of rows that are not greedy. Out: a token of each row. Called by `paged_attn/engine/sampling/`.
Change: the most likely token: `greedy.py`, `greedy_kernel.py`; sampled tokens (top-k, top-p, min-p): `sample.py`, `sample_kernel.py`.
Change: log-probabilities: `logprobs.py`, `logprobs_kernel.py`; penalties and masks of guides: `edits.py`, `edit_kernel.py`.
Change: what is compiled before it is needed: `ahead.py`.
Change: the settings they read: `sampling_tensors.py`.
"""
