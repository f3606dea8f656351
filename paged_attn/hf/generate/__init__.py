"""`model.generate(..., custom_generate=paged_attn.generate)`.

In: what transformers' `generate` hands to a decoding loop. Out: what its own loop returns.
Change: the loop, which reads the batch and has it column by column: `custom_generate.py`; the engine kept with a model: `kept_engine.py`.
Change: settings and logits processors as SamplingParams: `request_params.py`; what the engine does not do: `refuse.py`.
"""
