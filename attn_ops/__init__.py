"""Ops, specs of layers, and the inputs of one step; no kernels, no passes. Start with `context.py`: ops read batch, pools and plan there.

In: specs, and a step's batch and pools. Out: ops that a graph calls.
Change: ops: `ops/`; specs: `specs/`; batches: `batch/`; KV memory and state slots: `kv/`; recurrences in plain PyTorch: `scans/`.
Change: errors that users can cause: `errors.py`; the forward context: `context.py`; what Triton has built in C: `triton_launchers.py`.
Change: a model author's code that may fail: `model_code.py`; the current CUDA device: `current_device.py`.
Change: words of switches: `switches.py`; the command that installs an extra: `install_line.py`.
Change: kernels of backends that are called from here: `gpu_kernel.py`.
Change: files that only this user may write: `private_files.py`; entries of a table, or attributes, for a while: `replaced_entries.py`.
"""
