"""FlashInfer's kernels behind the contract. Start with `backend.py`.

In: a step's batch and one layer's tensors. Out: the layer's output rows.
Change: which kernel runs a part: `choose.py`; arguments of FlashInfer's wrappers: `planner.py`; their objects: `wrappers.py`.
Change: layers that share a plan: `kinds.py`; page tables: `tables.py`; what a layer calls: `launches.py`.
Change: TensorRT-LLM's kernels: `trtllm.py`; how the package is imported: `wrappers.py`.
"""
