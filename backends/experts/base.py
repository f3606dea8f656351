"""The contract of a backend for experts, and the problem by which one is selected."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paged_attn.attn_ops.specs.experts import ExpertsSpec, Gating
from paged_attn.backends.devices import architecture_of, device_word
from paged_attn.backends.needs import Needs, unmet_needs


@dataclass(frozen=True)
class ExpertsProblem:
    """A layer of experts on a device (a word of `device_word`; architecture 90 for SM90, None for devices other than CUDA's).

    Attributes:
        in_rows: w1 [E, n, H] and w2 [E, H, I] are contiguous in this order: not views of transposed ones, and gate and up not separate.
    """

    spec: ExpertsSpec
    dtype: torch.dtype
    device: str
    architecture: int | None = None
    in_rows: bool = True

    @classmethod
    def of(cls, spec: ExpertsSpec, *weights: Tensor) -> ExpertsProblem:
        """A layer with these weights: w1, and w2 if it may have another layout."""
        first, in_rows = weights[0], all(weight.dim() == 3 and weight.is_contiguous() for weight in weights)
        return cls(spec, first.dtype, device_word(first.device), architecture_of(first.device), in_rows)


def odd_widths(problem: ExpertsProblem, alignment: int) -> list[str]:
    """Reasons against a kernel that reads `alignment` bytes at a time, one for each row width that is not a multiple."""
    multiple = alignment // problem.dtype.itemsize
    return [
        f"a width of {width} is not a multiple of {multiple}" for width in (problem.spec.hidden, problem.spec.inner) if width % multiple
    ]


class ExpertsBackend(ABC):
    """Computes layers of experts. Has no state, so one instance serves all layers and engines.

    `forward` runs in captured graphs: it must not wait for the device or take a shape from data.
    """

    name: ClassVar[str]
    needs: ClassVar[Needs]

    def unmet(self, problem: ExpertsProblem) -> list[str]:
        """Every reason why it cannot run this layer, apart from packages; empty if it can."""
        return unmet_needs(self.needs, problem.dtype, problem.device, problem.architecture)

    @abstractmethod
    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, gating: Gating
    ) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            x: [T, H]; ids: [T, k] integers, where those from E on mean no expert; weights: [T, k].
            w1: [E, 2 I, H] (I if not gated), or [E, 2, I, H] if gate and up are separate; w2: [E, H, I]; both of any strides;
                b1: [E, 2 I]; b2: [E, H].

        Returns:
            [T, H] in x's dtype.
        """

    def compile_ahead(  # noqa: B027 (a hook)
        self, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, gating: Gating
    ) -> None:
        """Has other processes start to compile what `forward` needs for any number of such rows; by default nothing.

        The tensors may be fake: only their dtypes, strides and number of columns are read.
        """
