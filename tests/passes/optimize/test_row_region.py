"""What is written in place moves with all that shares its memory, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.passes.optimize.test_logits_gather import Use, moved


def test_what_is_written_inside_moves() -> None:
    def use(x: Tensor, m: Any, p: Tensor) -> Tensor:
        y = m.a(x)
        y.view(1, -1, 4, 8).mul_(2)
        y += x
        return y.sigmoid_()

    assert moved(use) == ["linear", "view", "mul_", "iadd", "sigmoid_"]


def writes_after_reading(x: Tensor, m: Any, p: Tensor) -> Tensor:
    x = x.roll(1, 1)
    y = m.a(x)
    x.add_(1)
    return y + x


def writes_through_a_view(x: Tensor, m: Any, p: Tensor) -> Tensor:
    x = x.roll(1, 1)
    view = x.view(1, -1, 4, 8)
    y = m.a(x)
    view.mul_(2)
    return y + view.flatten(2)


def writes_some_rows(x: Tensor, m: Any, p: Tensor) -> Tensor:
    y = m.a(x)
    y[:, 2:] = 0
    return y


@pytest.mark.parametrize(("use", "left"), [
    (writes_after_reading, ["add"]), (writes_through_a_view, ["flatten", "add"]), (writes_some_rows, []),
])  # fmt: skip
def test_what_is_written_from_outside_is_not_read_too_early(use: Use, left: list[str]) -> None:
    assert moved(use) == left
