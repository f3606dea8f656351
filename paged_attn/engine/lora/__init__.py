"""Adapters per request: read (`adapter_files.py`), kept in slots of stacked tensors (`lora_pool.py`), given to the graph's
variant with adapters (`lora_runner.py`) with each row's slot (`lora_slots.py`), which is compared with
the model once (`lora_check.py`).

In: adapters of peft, from a folder or a live model. Out: a second runner for steps in which a request has one.
A new setting of peft's that can be served: `adapter_files.py`.
"""
