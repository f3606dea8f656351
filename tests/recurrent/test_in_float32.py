"""A 16-bit layer that has no twin in float32 is served as before."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paged_attn.recurrent.as_ops.by_ops import with_ops
from paged_attn.recurrent.in_float32 import in_float32
from tests.recurrent.inline.remote import Model, Retention
from tests.recurrent.test_by_ops import layers_of


def with_attribute(value: Any) -> nn.Module:
    model = Model(Retention).bfloat16()
    for module in model.modules():
        if isinstance(module, Retention):
            module.more = value
    return model


@pytest.mark.parametrize(
    "value", [threading.Lock(), math, [nn.Linear(2, 2)], {"model": (nn.Linear(2, 2),)}], ids=lambda value: type(value).__name__
)
def test_a_module_that_cannot_be_copied_or_holds_another_one(value: Any) -> None:
    layers = layers_of(with_attribute(value))
    assert in_float32(layers[0]) is None
    assert with_ops(layers)[0].ops == ("linear_attention",)


def test_full_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = layers_of(with_attribute([1, "b"]))
    twin = in_float32(layers[0])
    assert twin is not None and {each.dtype for each in twin.module.state_dict().values()} == {torch.float32}

    def full(_: nn.Module) -> nn.Module:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(copy, "deepcopy", full)
    assert in_float32(layers[0]) is None


class Rounding(Retention):
    """Written for bfloat16."""

    def heads(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (each.to(torch.bfloat16).to(row.dtype) for each in super().heads(row))
        return q, k, v


def test_a_forward_that_rounds_in_float32_too() -> None:
    (layer,) = with_ops(layers_of(Model(Rounding).bfloat16()))
    assert layer.ops == ("linear_attention",), layer.why_no_ops
