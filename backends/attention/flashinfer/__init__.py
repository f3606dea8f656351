"""FlashInfer's kernels behind the contract: `backend.py` first; all that names FlashInfer's arguments is in
`planner.py`.
"""
