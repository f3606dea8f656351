"""One step as one ragged row of tokens.

In: requests as columns of integers (`requests.py`). Out: host and device tensors that ops, backends and graphs read.
Change: the tensors of a step, and which steps are refused: `build` in `batch.py`; their order, and buffers of
captured graphs: `step_buffers.py`.
Change: some requests as a separate batch: `part.py`; copies to the device: `packed_ints.py`.
"""
