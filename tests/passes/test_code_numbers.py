"""Which numbers that a module's code reaches may be numbers of tokens."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paged_attn.passes.recompute.code_numbers import first_unproved_length, numbers_in_code

FROM, AT_LEAST = 701, torch.tensor(702)
TABLE = {"lengths": [703, "none"]}
elsewhere = types.ModuleType("a_models_own_file")
elsewhere.MOST = 704  # type: ignore[attr-defined]


class Helper:
    limit = 705
    own: Tensor

    def fixed(self, x: Tensor) -> Tensor:
        return x if x.shape[1] < self.limit else x * self.own


def within(most: int) -> Callable[[Tensor], bool]:
    return lambda x: x.shape[1] < most


inside = within(707)


class Reads(nn.Module):
    """Computes `read(self, x)`."""

    kept = 708

    read: Callable[[Reads, Tensor], object]
    helper: Helper
    border: Tensor

    def forward(self, x: Tensor) -> object:
        return self.read(self, x)


def made(read: Callable[[Reads, Tensor], object], kind: type[Reads] = Reads) -> Reads:
    """Its attributes are set here, so that no code of its own names them all."""
    module = kind()
    module.read, module.helper, module.weight = read, Helper(), nn.Linear(709, 1)
    module.helper.own, module.helper.unnamed = torch.tensor([706]), 799  # type: ignore[attr-defined]
    module.register_buffer("border", torch.tensor(710))
    return module


def with_default(module: Reads, x: Tensor, most: int = 711) -> bool:
    return x.shape[1] < most


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda m, x: x.shape[1] > FROM, [701]),
        (lambda m, x: x.shape[1] > AT_LEAST, [702]),
        (lambda m, x: x.shape[1] > TABLE["lengths"][0], [703]),
        (lambda m, x: x.shape[1] > elsewhere.MOST, [704]),
        (lambda m, x: m.helper.fixed(x), [705, 706]),
        (lambda m, x: inside(x), [707]),
        (lambda m, x: x.shape[1] > m.kept, [708]),
        (lambda m, x: x.shape[1] > 709, []),  # a size of a weight
        (lambda m, x: x.shape[1] > m.border, [710]),
        (with_default, [711]),
        (lambda m, x: x.shape[1] in (712, 713), [712, 713]),
        (lambda m, x: x * torch.finfo(x.dtype).max, []),
    ],
)  # fmt: skip
def test_what_code_names_is_read(read: Callable[[Reads, Tensor], object], expected: list[int]) -> None:
    assert numbers_in_code(made(read), 600, 1000) == expected


@pytest.mark.parametrize(("number", "expected"), [(4096, 4096), (10000, None), (2048, None)])
def test_a_length_beyond_those_that_are_tried(number: int, expected: int | None) -> None:
    class Scaled(Reads):
        kept = number

    assert first_unproved_length(made(lambda m, x: x * m.kept, Scaled)) == expected


@pytest.mark.parametrize("name", ["pad_token_id", "padding_idx", "vocab_size", "intermediate_size", "rope_theta", "original_length"])
def test_what_a_config_calls_otherwise_is_no_length(name: str) -> None:
    """Phi-3's tokens end with 32,000, which 256 divides: a module that names it served no longer requests."""
    module = made(eval(f"lambda m, x: x.shape[1] > m.{name} or m.config.settings"))
    setattr(module, name, 32000)
    module.config = types.SimpleNamespace(settings={name: 32000})  # type: ignore[assignment]
    assert first_unproved_length(module) == (32000 if name == "original_length" else None)
