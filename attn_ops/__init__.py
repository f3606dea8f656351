"""What attention operations are, and the inputs of one step. No kernels, no passes. Start with `context.py`: ops find all else there.

In: specs, and a step's batch and pools. Out: ops that a graph calls.
Change: ops: `ops/`; specs: `specs/`; batches: `batch/`; KV memory and state slots: `kv/`; recurrences in plain PyTorch: `scans/`.
Change: errors that users can cause: `errors.py`; the forward context: `context.py`.
"""
