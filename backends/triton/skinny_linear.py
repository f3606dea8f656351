"""Linears of at most 16 rows: the launch of `skinny_kernel`, its sizes and its workspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_attn.attn_ops.linear_op import FEW_ROWS, set_few_row_linear
from paged_attn.backends.triton.fast_launch import FastKernel, device_index
from paged_attn.backends.triton.skinny_kernel import skinny_linear_kernel
from paged_attn.backends.triton.tiling import machine_of

_kernel = FastKernel(skinny_linear_kernel)
_MIN_PARTIAL = 1 << 20  # floats: enough for every default config, so that the workspace does not grow


@dataclass(frozen=True)
class SkinnyConfig:
    """How a launch cuts its work.

    Attributes:
        block_n, block_k: outputs of a tile, inputs of a block.
        stages, warps: of a program's software pipeline, of a program.
        programs_per_sm: programs of the grid for each multiprocessor.
        weight_left: the weight is the left operand of the matrix unit; otherwise x is, padded to 16 rows.
        hints: ask the caches to keep x and not the weight.
        whole: cut no tile; for sizes where whole tiles are about equal shares.
        early: launch before the kernel in front has ended (SM90 and later), and fetch `prefetch` blocks into L2 until then.
    """

    block_n: int = 64
    block_k: int = 128
    stages: int = 4
    warps: int = 4
    programs_per_sm: int = 2
    weight_left: bool = True
    hints: bool = False
    whole: bool = False
    early: bool = True
    prefetch: int = 4

    def constants(self, n: int, k: int, rows: int, multiprocessors: int, early: bool, bias: bool) -> dict[str, Any]:
        """Of the kernel, for the weight [n, k] and at most `rows` rows."""
        units = -(-n // self.block_n) * (1 if self.whole else -(-k // self.block_k))
        return {
            "N": n, "K": k, "PROGRAMS": min(units, self.programs_per_sm * multiprocessors), "ROWS": self.padded(rows),
            "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "STAGES": self.stages, "HAS_BIAS": bias, "WEIGHT_LEFT": self.weight_left,
            "HINTS": self.hints, "WHOLE": self.whole, "EARLY": early, "PREFETCH": self.prefetch if early else 0,
        }  # fmt: skip

    def padded(self, rows: int) -> int:
        """Rows that the matrix unit multiplies for `rows` rows of x."""
        return 8 if self.weight_left and rows <= 8 else FEW_ROWS

    def options(self, early: bool) -> dict[str, Any]:
        return {"num_warps": self.warps, "launch_pdl": early}


def config_of(n: int, k: int, rows: int) -> SkinnyConfig:
    """The config for a weight [n, k]; see benchmarks/skinny_linear.py."""
    return SkinnyConfig()


class _Workspace:
    """Of one device, for all launches on it: they must follow each other on one stream (or in graphs replayed on one)."""

    def __init__(self, device: torch.device) -> None:
        self.multiprocessors, self.early = machine_of(device).multiprocessors, machine_of(device).early
        self.device = device
        self.partial = torch.empty(0, device=device)
        self.counters = torch.empty(0, dtype=torch.int32, device=device)
        self._outgrown: list[Tensor] = []  # captured graphs hold their addresses
        self._launches: dict[Any, tuple[dict[str, Any], dict[str, Any]]] = {}

    def launch(self, config: SkinnyConfig, n: int, k: int, padded: int, bias: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Constants and options, with workspace enough for them."""
        key = (config, n, k, padded, bias)
        if (known := self._launches.get(key)) is None:
            early = config.early and self.early
            constants = config.constants(n, k, padded, self.multiprocessors, early, bias)
            if not config.whole:
                self._need(2 * constants["PROGRAMS"] * config.block_n * padded, constants["PROGRAMS"])
            known = self._launches[key] = constants, config.options(early)
        return known

    def _need(self, floats: int, counters: int) -> None:
        if floats <= self.partial.numel() and counters <= self.counters.numel():
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a linear of few rows needs {floats} floats of workspace and has {self.partial.numel()}, while a CUDA graph is being "
                "captured; run it once before the capture"
            )
        self._outgrown += [self.partial, self.counters]
        self.partial = torch.empty(max(floats, _MIN_PARTIAL), device=self.device)
        self.counters = torch.zeros(max(counters, 4 * self.multiprocessors), dtype=torch.int32, device=self.device)


_workspaces: dict[int, _Workspace] = {}


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, config: SkinnyConfig | None = None) -> Tensor:
    """x [T, K] or [1, T, K] with T <= 16, any row stride; weight [N, K] contiguous; bias [N]; one 16-bit dtype. Returns [..., N].

    Sums in float32, in an order that depends on the sizes alone. Launches on one device must be ordered by a stream: they share a workspace.

    Raises:
        ValueError: other shapes, dtypes or strides than these.
    """
    rows, (n, k) = x.shape[-2], weight.shape
    if x.dim() == 3 and x.shape[0] == 1:
        flat = x[0]
    elif x.dim() == 2:
        flat = x
    else:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [T, K] or [1, T, K]")
    y = x.new_empty((*x.shape[:-1], n))
    if rows == 0:
        return y
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    if not takes(flat, weight, bias) or rows > FEW_ROWS or x.shape[-1] != k or (bias is not None and bias.shape != (n,)):
        theirs = None if bias is None else (bias.dtype, list(bias.shape))
        raise ValueError(
            f"skinny_linear got x {x.dtype} {list(x.shape)}, weight {weight.dtype} {list(weight.shape)} strides {weight.stride()}, bias "
            f"{theirs}; allowed are at most {FEW_ROWS} rows, one 16-bit dtype and a contiguous weight; use torch.nn.functional.linear"
        )
    device = device_index(x.device)
    workspace = _workspaces.get(device)
    if workspace is None:
        workspace = _workspaces[device] = _Workspace(x.device)
    config = config or config_of(n, k, rows)
    padded = config.padded(rows)
    constants, options = workspace.launch(config, n, k, padded, bias is not None)
    stride = flat.stride(0)
    _kernel(
        (config, n, k, padded, bias is not None, x.dtype, stride == 1, stride % 16 == 0),
        (constants["PROGRAMS"], 1),
        (flat, weight, weight if bias is None else bias, y, workspace.partial, workspace.counters, rows, stride),
        constants, options, device,
    )  # fmt: skip
    return y


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether dtypes and strides are those of the kernel."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and weight.dtype == x.dtype
        and (bias is None or (bias.dtype == x.dtype and bias.stride(0) == 1))
        and weight.dim() == 2
        and weight.is_contiguous()
    )


def register() -> None:
    """Let `torch.ops.paged_attn.linear` use the kernel in this process."""
    set_few_row_linear(skinny_linear)
