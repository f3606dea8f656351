"""Backends that SGLang lists and this project has no tested kernel call for: their capabilities, and why they are refused.

The rows say what SGLang 0.5's documentation and the packages' own checks say of each, and nothing more: a feature that neither names
is not declared, and where no head dims are named, it is that of the models that the documentation runs. Most need hardware that no
test of ours runs on. None is ever picked by "auto", and asking for one by name gives the true reason: the device first, if it is wrong.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.install_line import install_line
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.backends.attention.base import AttentionBackend, AttentionCall
from paged_attn.backends.attention.capabilities import ANY_SIZE, Capabilities, Feature, OneOf, Sizes
from paged_attn.backends.needs import Requirement

HALF = frozenset({torch.bfloat16, torch.float16})
NO_ROCM = "a CUDA GPU or a CPU; nothing here has run on ROCm"
PAGE_128 = OneOf({128})
LLAMAS = OneOf({128})  # the head dim of Llama 3.1 and Qwen2.5


def _row(
    instead: str,
    devices: str,
    *features: Feature,
    needs: tuple[str, str] | None,
    architectures: tuple[int, ...] = (),
    head_dims: Sizes = LLAMAS,
    page_sizes: Sizes = ANY_SIZE,
    dim_pairs: frozenset[tuple[int, int]] = frozenset(),
    note: str = "",
) -> Capabilities:
    return Capabilities(
        devices=frozenset({devices}),
        dtypes=HALF,
        kv_dtypes=HALF,
        features=frozenset(features),
        architectures=frozenset(architectures),
        head_dims=head_dims,
        page_sizes=page_sizes,
        requirements=() if needs is None else (Requirement(needs[0], "", needs[1]),),
        note=note,
        dim_pairs=dim_pairs,
        blocked=f"this project has no tested kernel call for it yet: use {instead}",
    )


class UnsupportedBackend(AttentionBackend):
    """A name and its capabilities, without a kernel call.

    Raises:
        UnsupportedError: always, on construction.
    """

    capabilities: ClassVar[Capabilities]

    def __init__(self, *, deterministic: bool = False) -> None:
        self._refuse()

    def plan(self, batch: Batch, pool: KVPool) -> Any:
        self._refuse()

    def write_kv(self, plan: Any, call: AttentionCall) -> None:
        self._refuse()

    def forward_extend(self, plan: Any, call: AttentionCall) -> None:
        self._refuse()

    def forward_decode(self, plan: Any, call: AttentionCall) -> None:
        self._refuse()

    @classmethod
    def _refuse(cls) -> NoReturn:
        devices = ", ".join(sorted(cls.capabilities.devices))
        raise UnsupportedError(f"attention backend {cls.name!r} (for {devices}) is known but can not run: {cls.capabilities.blocked}")


class FA4Backend(UnsupportedBackend):
    name = "fa4"
    capabilities = _row(
        "fa3 on Hopper, flashinfer or triton on Blackwell",
        "cuda", Feature.WINDOW, Feature.BIDIRECTIONAL,
        architectures=(90, 100, 103), head_dims=OneOf({64, 96, 128}), dim_pairs=frozenset({(192, 128)}), page_sizes=PAGE_128,
        needs=("flash_attn", "pip install flash-attn-4"), note="FlashAttention 4 (CuTe DSL)",
    )  # fmt: skip


class DualChunkBackend(UnsupportedBackend):
    name = "dual_chunk_flash_attn"
    capabilities = _row(
        "triton, which runs the same formula in three launches",
        "cuda", Feature.DUAL_CHUNK, needs=("sgl_kernel", install_line("sgl")), note="dual chunk attention of Qwen2.5-1M",
    )  # fmt: skip


class AiterBackend(UnsupportedBackend):
    name = "aiter"
    capabilities = _row(
        NO_ROCM, "hip", Feature.MLA, head_dims=OneOf({64, 128, 256}),
        needs=("aiter", "build it from https://github.com/ROCm/aiter"), note="AMD's kernels for ROCm",
    )  # fmt: skip


class WaveBackend(UnsupportedBackend):
    name = "wave"
    capabilities = _row(
        NO_ROCM, "hip", needs=("wave_lang", "pip install wave-lang"), note="kernels in the Wave language for ROCm"
    )  # fmt: skip


class AscendBackend(UnsupportedBackend):
    name = "ascend"
    capabilities = _row(
        "a CUDA GPU or a CPU; nothing here has run on an NPU", "npu", Feature.MLA,
        page_sizes=PAGE_128, needs=("torch_npu", "pip install torch-npu"), note="Huawei's fused attention",
    )  # fmt: skip


class IntelAmxBackend(UnsupportedBackend):
    name = "intel_amx"
    capabilities = _row(
        "torch_native", "cpu-amx",
        needs=("sgl_kernel", "build sgl-kernel for the CPU as SGLang's documentation says"), note="SGLang's kernels for CPUs with AMX",
    )  # fmt: skip


class IntelXpuBackend(UnsupportedBackend):
    name = "intel_xpu"
    capabilities = _row(
        "a CUDA GPU or a CPU; nothing here has run on an Intel GPU", "xpu", Feature.WINDOW,
        head_dims=OneOf({64, 96, 128, 192, 256}), page_sizes=OneOf({64, 128}),
        needs=("sgl_kernel", "build https://github.com/sgl-project/sgl-kernel-xpu"), note="SGLang's kernels for Intel GPUs",
    )  # fmt: skip
