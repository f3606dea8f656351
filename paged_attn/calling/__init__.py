"""Calls a user's model, leaves it unchanged, and finds out how its forward must be called.

In: a model. Out: context managers around its calls, and facts about its forward.
Change: arguments of forward: `call_signature.py`; evaluation mode, only logits: `evaluating.py`; configs: `hf_configs.py`.
Change: restoring what a call changed: `left_as_it_was.py`; the caller's modes: `plain_modes.py`; compiled calls: `uncompiled.py`.
Change: replacing a forward temporarily: `replaced_forward.py`; transformers' own functions: `reference_functions.py`.
Change: a model without its head: `body.py`.
"""
