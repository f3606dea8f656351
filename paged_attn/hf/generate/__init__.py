"""`model.generate(..., custom_generate=paged_attn.generate)`.

In: what transformers' `generate` hands to a decoding loop. Out: what transformers' own loop returns.
Change: the loop, which hands tokens back one column at a time: `custom_generate.py`; the engine kept with a model: `kept_engine.py`.
Change: settings and logits processors as SamplingParams: `request_params.py`; what the engine does not support: `refuse.py`.
"""
