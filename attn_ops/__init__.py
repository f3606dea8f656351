"""What attention operations are, and what one step gives them. No kernel, no pass. `context.py` comes first: an op finds the rest there.

In: specs, and a step's batch and pools. Out: ops that a graph calls.
Change: ops: `ops/`; specs: `specs/`; batches: `batch/`; KV memory and state slots: `kv/`; recurrences in plain PyTorch: `scans/`.
Change: errors that users cause: `errors.py`; the forward context: `context.py`.
"""
