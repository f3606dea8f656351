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
    """A layer of experts on a device: a word of `device_word`, and 90 for SM90, None off CUDA.

    Attributes:
        in_rows: w1 [E, n, H] and w2 [E, H, I] lie as they are written, and are not views of transposed ones, or with gate and up apart.
    """

    spec: ExpertsSpec
    dtype: torch.dtype
    device: str
    architecture: int | None = None
    in_rows: bool = True

    @classmethod
    def of(cls, spec: ExpertsSpec, *weights: Tensor) -> ExpertsProblem:
        """A layer with such weights (w1, and w2 where it may lie otherwise), where they lie."""
        first, in_rows = weights[0], all(weight.dim() == 3 and weight.is_contiguous() for weight in weights)
        return cls(spec, first.dtype, device_word(first.device), architecture_of(first.device), in_rows)


def odd_widths(problem: ExpertsProblem, alignment: int) -> list[str]:
    """Reasons against a kernel that reads rows of so many bytes at a time, one for each width that is not a multiple of them."""
    multiple = alignment // problem.dtype.itemsize
    return [
        f"a width of {width} is not a multiple of {multiple}" for width in (problem.spec.hidden, problem.spec.inner) if width % multiple
    ]


class ExpertsBackend(ABC):
    """Computes layers of experts. It keeps nothing, so that one object serves all layers and engines.

    `forward` runs in captured graphs: it must neither wait for the device nor take a shape from data.
    """

    name: ClassVar[str]
    needs: ClassVar[Needs]

    def unmet(self, problem: ExpertsProblem) -> list[str]:
        """Every reason why it cannot run this layer, packages apart; empty if it can."""
        return unmet_needs(self.needs, problem.dtype, problem.device, problem.architecture)

    @abstractmethod
    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, gating: Gating
    ) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            x: [T, H]; ids: [T, k] integers, of which those beyond the experts count as none; weights: [T, k].
            w1: [E, 2 I, H] (I where nothing is gated), or [E, 2, I, H] where gate and up lie apart; w2: [E, H, I]; both of any strides;
                b1: [E, 2 I]; b2: [E, H].

        Returns:
            [T, H] in x's dtype.
        """

    def compile_ahead(  # noqa: B027 (a hook)
        self, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, gating: Gating
    ) -> None:
        """Have other processes begin to compile what `forward` of any number of such rows needs; by default nothing.

        The tensors may be fake: their types and strides are read, and how many columns they have.
        """
