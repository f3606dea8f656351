"""`model.generate(..., custom_generate=paged_attn.generate)`. In: what transformers' `generate` hands to a decoding loop. Out: what its own
loop returns. `custom_generate.py` is the loop, which reads the batch and has it column by column, `refuse.py` says what the engine
does not do, `request_params.py` turns settings and logits processors into SamplingParams of each row,
`kept_engine.py` keeps one engine with a model.
"""
