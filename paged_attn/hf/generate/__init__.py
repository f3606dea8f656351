"""`model.generate(..., custom_generate=paged_attn.generate)`. In: what transformers' `generate` hands to a decoding loop. Out: what its own
loop returns. `custom_generate.py` is the loop, `prompt_rows.py` reads the batch, `refuse.py` says what the engine does not do,
`request_params.py` and `row_processors.py` turn settings and logits processors into SamplingParams of each row, `lockstep.py` is the batch
column by column, `kept_engine.py` keeps one engine with a model.
"""
