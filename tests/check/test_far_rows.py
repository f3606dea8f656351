"""Models that mix tokens over more of them than a probe prompt has: right for short prompts, wrong for long ones and in a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn import LLM
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.check.runs.steps import LENGTHS
from tests.engine.runners.own_positions import PLACES, WIDTH, Decoder

FAR = max(LENGTHS) + 6
Place = Callable[[Any, Tensor], Tensor]


def shifted(_: Any, x: Tensor) -> Tensor:
    return x + F.pad(x, (0, 0, FAR, 0))[:, : x.shape[1]]


def convolved(model: Any, x: Tensor) -> Tensor:
    kernel = model.pe[0, :2].T[:, None]
    return x + F.conv1d(F.pad(x.transpose(1, 2), (FAR, 0)), kernel, dilation=FAR, groups=WIDTH).transpose(1, 2)


def with_a_capacity(model: Any, x: Tensor) -> Tensor:
    """Two experts, of which each takes so many tokens of a call and no more."""
    chosen = F.one_hot((x[..., 0] > 0).long(), 2)
    taken = chosen * ((chosen.cumsum(1) * chosen) <= max(LENGTHS))
    return x + 2 * taken.to(x.dtype) @ model.pe[0, :2]


def summarised(_: Any, x: Tensor) -> Tensor:
    """Every block of tokens sees the means of all blocks before it."""
    length = x.shape[1]
    blocks = F.pad(x, (0, 0, 0, -length % FAR)).view(1, -1, FAR, WIDTH).mean(2)
    return x + 4 * F.pad(blocks, (0, 0, 1, 0))[:, :-1].cumsum(1).repeat_interleave(FAR, 1)[:, :length]


MIXING: dict[str, tuple[Place, str]] = {
    "a shift": (shifted, "the model's forward: pad mixes tokens"),
    "a dilated convolution": (convolved, "the model's forward: pad mixes tokens"),
    "a capacity": (with_a_capacity, "the model's forward: cumsum mixes tokens"),
    "blocks": (summarised, "the model's forward: pad mixes tokens"),
    "a shift back": (lambda m, x: x + F.pad(x, (0, 0, 0, FAR))[:, FAR:], "the model's forward: pad mixes tokens"),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_that_far_apart_is_refused(name: str) -> None:
    place, words = MIXING[name]
    with pytest.raises(UnsupportedError, match=words):
        LLM(Decoder(place).eval(), num_pages=40)


class PenalisesRepeats(Decoder):
    """Takes something off the logit of whatever the call has had six times before."""

    def forward(self, idx: Tensor, targets: None = None) -> tuple[Tensor, None]:
        logits, _ = super().forward(idx)
        seen = F.one_hot(idx, logits.shape[-1]).cumsum(1)
        return logits - 2 * (seen >= 6).to(logits.dtype), None


class CapsBySize(Decoder):
    """Scales by a number that is 1 for a probe, and is computed from the number of tokens in Python."""

    def forward(self, idx: Tensor, targets: None = None) -> tuple[Tensor, None]:
        self.place = lambda m, x: x * max(1.0, math.log(x.shape[1] + 1.0) / math.log(FAR)) ** 4
        return super().forward(idx)


@pytest.mark.parametrize(
    ("kind", "words"),
    [(PenalisesRepeats, "the model's forward: seen mixes tokens"), (CapsBySize, "the trace holds for one length only")],
)
def test_so_is_what_follows_the_number_of_tokens(kind: type[nn.Module], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        LLM(kind(PLACES["none"][0]).eval(), num_pages=40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_their_own_are_served_among_many(dtype: torch.dtype) -> None:
    LLM(Decoder(PLACES["learned"][0]).to(dtype).eval(), num_pages=40).close()
