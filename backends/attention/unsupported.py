"""Backends that SGLang lists and this project has no tested kernel call for: their capabilities, and why they are refused.

The rows say what SGLang 0.5's documentation and the packages' own checks say of each, and nothing more: a feature that neither names
is not declared, and where no head dims are named, it is that of the models that the documentation runs. Most need hardware that no
test of ours runs on. None is ever picked by "auto", and asking for one by name gives the true reason: the device first, if it is wrong.
"""

from __future__ import annotations

from typing import ClassVar, NoReturn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.install_line import install_line
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.capabilities import ANY_SIZE, Capabilities, Feature, OneOf, Sizes
from paged_attn.backends.needs import HALF, Requirement

NO_ROCM = "a CUDA GPU or a CPU; nothing here has run on ROCm"
PAGE_128 = OneOf({128})
LLAMAS = OneOf({128})  # the head dim of Llama 3.1 and Qwen2.5


class UnsupportedBackend(AttentionBackend):
    """A name and its capabilities, without a kernel call.

    Raises:
        UnsupportedError: always, on construction.
    """

    capabilities: ClassVar[Capabilities]

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        devices = ", ".join(sorted(self.capabilities.devices))
        raise UnsupportedError(f"attention backend {self.name!r} (for {devices}) is known but cannot run: {self.capabilities.blocked}")

    __init__ = plan = write_kv = forward_extend = forward_decode = _refuse


def _known(
    name: str,
    instead: str,
    devices: str,
    *features: Feature,
    needs: tuple[str, str],
    architectures: tuple[int, ...] = (),
    head_dims: Sizes = LLAMAS,
    page_sizes: Sizes = ANY_SIZE,
    dim_pairs: frozenset[tuple[int, int]] = frozenset(),
    note: str = "",
) -> type[UnsupportedBackend]:
    capabilities = Capabilities(
        devices=frozenset({devices}),
        dtypes=HALF,
        kv_dtypes=HALF,
        features=frozenset(features),
        architectures=frozenset(architectures),
        head_dims=head_dims,
        page_sizes=page_sizes,
        requirements=(Requirement(needs[0], "", needs[1]),),
        note=note,
        dim_pairs=dim_pairs,
        blocked=f"this project has no tested kernel call for it yet: use {instead}",
    )
    return type(name, (UnsupportedBackend,), {"name": name, "capabilities": capabilities})


FA4Backend = _known(
    "fa4", "fa3 on Hopper, flashinfer or triton on Blackwell",
    "cuda", Feature.WINDOW, Feature.BIDIRECTIONAL,
    architectures=(90, 100, 103), head_dims=OneOf({64, 96, 128}), dim_pairs=frozenset({(192, 128)}), page_sizes=PAGE_128,
    needs=("flash_attn", "pip install flash-attn-4"), note="FlashAttention 4 (CuTe DSL)",
)  # fmt: skip
DualChunkBackend = _known(
    "dual_chunk_flash_attn", "triton, which runs the same formula in three launches",
    "cuda", Feature.DUAL_CHUNK, needs=("sgl_kernel", install_line("sgl")), note="dual chunk attention of Qwen2.5-1M",
)  # fmt: skip
AiterBackend = _known(
    "aiter", NO_ROCM, "hip", Feature.MLA, head_dims=OneOf({64, 128, 256}),
    needs=("aiter", "build it from https://github.com/ROCm/aiter"), note="AMD's kernels for ROCm",
)  # fmt: skip
WaveBackend = _known(
    "wave", NO_ROCM, "hip", needs=("wave_lang", "pip install wave-lang"), note="kernels in the Wave language for ROCm"
)  # fmt: skip
AscendBackend = _known(
    "ascend", "a CUDA GPU or a CPU; nothing here has run on an NPU", "npu", Feature.MLA,
    page_sizes=PAGE_128, needs=("torch_npu", "pip install torch-npu"), note="Huawei's fused attention",
)  # fmt: skip
IntelAmxBackend = _known(
    "intel_amx", "torch_native", "cpu-amx",
    needs=("sgl_kernel", "build sgl-kernel for the CPU as SGLang's documentation says"), note="SGLang's kernels for CPUs with AMX",
)  # fmt: skip
IntelXpuBackend = _known(
    "intel_xpu", "a CUDA GPU or a CPU; nothing here has run on an Intel GPU", "xpu", Feature.WINDOW,
    head_dims=OneOf({64, 96, 128, 192, 256}), page_sizes=OneOf({64, 128}),
    needs=("sgl_kernel", "build https://github.com/sgl-project/sgl-kernel-xpu"), note="SGLang's kernels for Intel GPUs",
)  # fmt: skip
