"""The float32 reference in `attn_ops/scans/` as a backend: runs everywhere, and others are compared with it."""

from __future__ import annotations

from typing import ClassVar

from paged_attn.attn_ops.ops.scans import Kernels
from paged_attn.backends.needs import UP_TO_FLOAT32, Needs
from paged_attn.backends.scans.base import OPS, ScansBackend


class TorchScans(ScansBackend):
    name = "torch"
    needs: ClassVar[Needs] = Needs(
        devices=frozenset({"cpu", "cuda", "hip", "npu", "xpu"}), dtypes=UP_TO_FLOAT32, note="plain PyTorch, float32 inside"
    )
    ops = OPS

    def kernels(self) -> Kernels:
        return {}
