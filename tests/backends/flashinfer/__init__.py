"""Tests of the backends that run FlashInfer's kernels."""
