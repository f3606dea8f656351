"""The interface of the checks to the served model: a rewritten graph in pieces (`traced`) or a hooked model (`hooked`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.model_code import model_code
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.check.runs.boundaries import Boundary
from paged_attn.check.runs.choices import Choices, Perturbation
from paged_attn.check.runs.steps import ProbeSettings
from paged_attn.check.runs.tapped import Visit
from paged_attn.recurrent.layer import RecurrentLayer

VisitBoundary = Callable[[Boundary, Tensor], Tensor]


def must_run(what: str, on: str, why_not: str = "The model's code depends on the length.") -> AbstractContextManager[None]:
    """For calling a graph: one that breaks at another length than the traced one was specialised to that length."""
    failed = f"self-check failed: {what} cannot run {on}"
    return model_code(lambda why: UnsupportedError(f"{failed}: {why}. {why_not}"))


class Seen(NamedTuple):
    """One value between two ops that mix tokens, in a run that left those ops out: where it is computed, and what it was."""

    module: str
    value: Tensor


@dataclass(frozen=True)
class HowToRun:
    """How the original runs a prompt, where it is not as it is.

    Attributes:
        wide: compute in wider numbers, as far as that can be.
        token_by_token: run recurrent layers so.
        perturbed: move the results of operations.
        choices: what operations choose, in place of what they would.
        positions: [T] int64, by default 0, 1, ...
    """

    wide: bool = False
    token_by_token: bool = False
    perturbed: Perturbation | None = None
    choices: Choices | None = None
    positions: Tensor | None = None


AS_IT_IS = HowToRun()


class Original(ABC):
    """The model as its user has it, one prompt at a time.

    Attributes:
        narrow: its own floating type.
        recurrent: its layers with recurrent state.
        computed_as_it_is: what has no form in wider numbers, once `run` was asked for those.
    """

    narrow: torch.dtype
    recurrent: Sequence[RecurrentLayer]
    computed_as_it_is: set[str]

    @abstractmethod
    def run(self, prompt: Tensor, visit: Visit, how: HowToRun = AS_IT_IS) -> Tensor:
        """Logits [T, vocabulary] of one prompt [T] int64; what `visit` returns of a value goes on in its place."""

    @abstractmethod
    def padded_length(self, count: int) -> int:
        """How many rows values have in a run of so many tokens; no two lengths become one."""

    @abstractmethod
    def module_of(self, name: str) -> str:
        """Where a value is computed, for messages."""


class Served(ABC):
    """A model as it runs in ragged batches.

    Attributes:
        specs: its attention layers, for a pool.
        kv_dtype: of that pool.
        by_layer: what each attention layer writes.
        otherwise: what to do where a layer is not recognised as what it is.
        more_than_attention: why a part between the attentions may differ from the model's, and what to do.
    """

    specs: Sequence[AttentionSpec]
    kv_dtype: torch.dtype
    recurrent: Sequence[RecurrentLayer]
    settings: ProbeSettings
    by_layer: Mapping[int, Boundary]
    otherwise: str
    more_than_attention: str

    @property
    def is_causal(self) -> bool:
        return all(spec.causal for spec in self.specs)

    @abstractmethod
    def variant(self, settings: ProbeSettings, compiled: bool = True) -> Served | None:
        """The same with other settings, or without anything that was compiled; None if nothing was."""

    @abstractmethod
    def run(self, batch: Batch, visit: VisitBoundary) -> Tensor:
        """Logits [N, vocabulary] of the batch's `logits_rows`, under its context."""

    @abstractmethod
    def run_pieces(self, batch: Batch, visit: VisitBoundary) -> Mapping[Any, Seen]:
        """Run all but the ops that mix tokens, whose results are zero before `visit` is given them; what was computed between them."""

    @abstractmethod
    def operands(self, batch: Batch, visit: VisitBoundary, layer_id: int) -> dict[str, Tensor]:
        """What the op of a layer is given in a run under the batch's context: query, key, value [T, heads, dim]; sinks and bias where it
        has them; nothing where it stores no keys of its own."""
