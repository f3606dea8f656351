"""Logits to tokens, on the device, every row by its own settings. Start with `sampler.py`.

In: a step's logits and the `SamplingState` of each row that samples. Out: a `SamplerOutput`: tokens, and log-probabilities where asked.
Change: the order of edits: `_edited` in `sampler.py`; what the device gets of the settings: `row_settings.py`.
Change: penalties: `token_counts.py`; forbidden tokens and bad words: `forbidden.py`; processors: `process` in `sampler.py`.
Change: schemas and grammars: `structured/`.
Change: drawing tokens: `sample_tokens.py`, and for a GPU `backends/sampling/`; seeds: `sampling_state.py`.
Change: log-probabilities: `logprobs.py`; those of prompts: `prompt_scores.py`; what comes to the host: `sampler_output.py`.
"""
