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
    """For calls of a graph: if it fails at another length than the traced one, it was specialised to that length."""
    failed = f"self-check failed: {what} cannot run {on}"
    return model_code(lambda why: UnsupportedError(f"{failed}: {why}. {why_not}"))


class Seen(NamedTuple):
    """A value between two ops that mix tokens, in a run that skipped those ops, and the module that computes it."""

    module: str
    value: Tensor


@dataclass(frozen=True)
class HowToRun:
    """How the original runs a prompt, if not as usual.

    Attributes:
        wide: compute in wider numbers where possible.
        token_by_token: run recurrent layers one token at a time.
        perturbed: perturb the results of operations.
        choices: what operations choose, in place of their own choices.
        positions: [T] int64, by default 0, 1, ...
    """

    wide: bool = False
    token_by_token: bool = False
    perturbed: Perturbation | None = None
    choices: Choices | None = None
    positions: Tensor | None = None


AS_IT_IS = HowToRun()


class Original(ABC):
    """The user's model, run on one prompt at a time.

    Attributes:
        narrow: its floating-point dtype.
        recurrent: its layers with recurrent state.
        computed_as_it_is: after a run with `wide`, the operations that have no form in wider numbers.
    """

    narrow: torch.dtype
    recurrent: Sequence[RecurrentLayer]
    computed_as_it_is: set[str]

    @abstractmethod
    def run(self, prompt: Tensor, visit: Visit, how: HowToRun = AS_IT_IS) -> Tensor:
        """Logits [T, vocabulary] of one prompt [T] int64; the results of `visit` replace the values it was called with."""

    @abstractmethod
    def padded_length(self, count: int) -> int:
        """The number of rows of values in a run of `count` tokens; different for different counts."""

    @abstractmethod
    def module_of(self, name: str) -> str:
        """Where a value is computed, for messages."""


class Served(ABC):
    """A model as it runs in ragged batches.

    Attributes:
        specs: its attention layers, for a pool.
        kv_dtype: the pool's.
        by_layer: the value that each attention layer writes.
        otherwise: what a user can do if a layer was recognised wrongly.
        more_than_attention: why a part between the attentions may differ from the model's, and what a user can do.
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
        """The same model with other settings, or with nothing compiled; None if nothing was compiled."""

    @abstractmethod
    def run(self, batch: Batch, visit: VisitBoundary) -> Tensor:
        """Logits [N, vocabulary] of the batch's `logits_rows`, under its context."""

    @abstractmethod
    def run_pieces(self, batch: Batch, visit: VisitBoundary) -> Mapping[Any, Seen]:
        """Runs everything except the ops that mix tokens, whose results are zero before `visit` gets them; returns all other values."""

    @abstractmethod
    def operands(self, batch: Batch, visit: VisitBoundary, layer_id: int) -> dict[str, Tensor]:
        """The operands of a layer's op in a run under the batch's context: query, key, value [T, heads, dim]; sinks and bias if it has
        them. Empty if it stores no keys of its own."""
