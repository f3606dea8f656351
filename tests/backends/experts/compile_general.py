"""Compiles the general kernels for experts, as they are launched on the GPU that is named, without having it; prints a line of JSON for
each, with the bytes of shared memory and of a thread's spilled registers. Run by test_general_kernels in a process of its own, because a
process of the tests runs Triton's interpreter."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import torch

from paged_attn.backends.experts.triton import few, grouped
from paged_attn.backends.experts.triton.backend import TritonExpertsBackend
from tests.backends.experts.operands import GATINGS, operands
from tests.backends.gpus import named, only_compiled
from tests.backends.kernel_resources import resources_of

SIZES: dict[str, Any] = {"experts": 8, "top_k": 2, "hidden": 1024, "width": 512, "bias": True}
TOKENS = (3, 16, 80, 320, 3000)  # for few tokens, and for each tiling


def main() -> None:
    compiled: dict[int, Any] = {}

    def launch(kernel: Any, *given: Any, **constants: Any) -> None:
        result = only_compiled(kernel, *given, **constants)
        compiled.setdefault(id(result), (kernel.__name__, result))

    machine = lambda device: named().machine  # noqa: E731
    with (
        patch.object(few, "launch", launch), patch.object(grouped, "launch", launch),
        patch.object(grouped, "machine_of", machine), patch.object(grouped, "hopper_products", lambda *given: None),
        patch("paged_attn.backends.machine.machine_of", machine),
    ):  # fmt: skip
        for dtype in (torch.bfloat16, torch.float32):
            for gating in ("silu", "interleaved, clamped, alpha"):
                for tokens in TOKENS:
                    TritonExpertsBackend().forward(*operands(tokens, GATINGS[gating], dtype=dtype, **SIZES))
                for name, result in compiled.values():
                    print(json.dumps({"kernel": name, "dtype": str(dtype), "gating": gating, **resources_of(result)}), flush=True)
                compiled.clear()


if __name__ == "__main__":
    main()
