"""FlashInfer's kernels behind the contract."""
