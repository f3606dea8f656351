"""Adapters per request.

In: adapters of peft, from a folder or a live model. Out: a second runner, for steps in which a request has an adapter.
Change: which adapters are read, and which are refused: `adapter_files.py`; their slots of stacked tensors: `lora_pool.py`.
Change: the runner, each row's slot, and the comparison with the model, once: `lora_runner.py`.
"""
