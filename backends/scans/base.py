"""The contract of a backend for scans on slots of state, and the problem by which one is selected."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paged_attn.attn_ops.ops.scans import Kernels
from paged_attn.attn_ops.scans.state_rows import Extends, Wave
from paged_attn.backends.needs import Needs, names_of, unmet_needs

OPS = frozenset({"short_conv", "gated_delta_rule", "kda", "linear_attention", "mamba2_scan", "mamba1_scan", "channel_scan"})
# (rows of each given tensor, the wave, states [N, ...] before its segments) -> (output rows, states after them).
Sequences = Callable[[Sequence[Tensor], Wave, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ScanProblem:
    """One op of a layer: its name without `_with_output`, the shape of a request's state, the dtype of its rows, and the device (a word of
    `device_word`; architecture 90 for SM90, None for devices other than CUDA's)."""

    op: str
    state: tuple[int, ...]
    dtype: torch.dtype
    device: str
    architecture: int | None = None

    def describe(self) -> str:
        """`kda with a state of 4x128x128`"""
        return f"{self.op} with a state of {'x'.join(map(str, self.state))}"


class ScansBackend(ABC):
    """Computes scans. Has no state, so one instance serves all layers and engines."""

    name: ClassVar[str]
    needs: ClassVar[Needs]
    ops: ClassVar[frozenset[str]]
    compiles_ahead: ClassVar[bool] = False  # whether all launches of its kernels go through `backends.compiling.compile_ahead`

    def unmet(self, problem: ScanProblem) -> list[str]:
        """Every reason why it cannot compute this op, apart from packages; empty if it can."""
        reasons = unmet_needs(self.needs, problem.dtype, problem.device, problem.architecture)
        if problem.op not in self.ops:
            reasons.append(f"computes {names_of(self.ops)}")
        return reasons

    @abstractmethod
    def kernels(self) -> Kernels:
        """The kernels for all its ops. A function without one is left to the first backend that fits.

        Raises:
            ImportError: a package that it needs does not load.
        """


def run_by_segments(given: Sequence[Tensor], output: Tensor, states: Tensor, extends: Extends, run: Sequences) -> None:
    """Calls `run` for the first segments of all requests, then for the second ones, and so on; usually there is one.

    A segment starts from the previous state in the dtype of `states`, as a request that starts there does.
    """
    now = extends.before(states)
    for wave in extends.waves:
        result, after = run([each[wave.rows] for each in given], wave, now[wave.owners])
        output[wave.rows] = result.to(output.dtype)
        now[wave.owners] = states[wave.targets] = after.to(states.dtype)
