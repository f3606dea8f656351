"""Calls a user's model, leaves it unchanged, and finds out how its forward must be called.

In: a model. Out: context managers around its calls, and facts about its forward.
Change: arguments of forward: `call_signature.py`; a model without its head: `body.py`; configs: `hf_configs.py`, while tracing
`plain_configs.py`.
Change: the caller's modes, and evaluation mode: `plain_modes.py`; restoring what a call or we changed: `left_as_it_was.py`.
Change: two calls that are compared block by block: `block_by_block.py`.
Change: compiled calls: `uncompiled.py`; models of peft: `peft_models.py`; transformers' own functions: `reference_functions.py`.
"""
