"""Turns logits into tokens on the device, each row with its own settings. Start with `sampler.py`.

In: a step's logits and the `SamplingState` of each row that samples. Out: a `SamplerOutput`: tokens, and log-probabilities where requested.
Change: the order of edits: `_edit` in `sampler.py`; settings on the device: `row_settings.py`.
Change: penalties: `token_counts.py`; forbidden and allowed tokens, bad words: `forbidden.py`; processors: `process` in `sampler.py`.
Change: schemas and grammars: `structured/`.
Change: sampling: `sample_tokens.py`, and for a GPU `backends/sampling/`; seeds: `sampling_state.py`.
Change: log-probabilities, scores of prompts, copies to the host: `sampler_output.py`.
"""
