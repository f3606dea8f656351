"""Captured decode steps hold a layer's own forward where it launches the same whatever the requests are, and nothing else."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paged_attn.attn_ops.ops.define import define_op
from paged_attn.recurrent.discover import find_recurrent_layers
from paged_attn.recurrent.in_graphs import Launches, NotCapturable, first_difference, with_graphs
from paged_attn.recurrent.layer import RecurrentLayer, mapped
from tests.recurrent.test_discover import ForgetsInChunks, Gated, LooksAtItsRows, Mixer, MixesRequests, Nested, Toy, inputs_of
from tests.recurrent_models import recurrent


class Counting(Mixer):
    """Knows as a number of Python how often it was called: right in every call, as it multiplies by one in the end."""

    calls = 0

    def start(self, state: Tensor | None, hidden: Tensor) -> Tensor:
        self.calls += 1
        return super().start(state, hidden * self.calls / self.calls)


class CountingInTensors(Counting):
    def start(self, state: Tensor | None, hidden: Tensor) -> Tensor:
        self.calls += 1
        number = torch.tensor(float(self.calls))
        return Mixer.start(self, state, hidden) * number / number


class Branching(Counting):
    """Takes another way in every second call."""

    def start(self, state: Tensor | None, hidden: Tensor) -> Tensor:
        self.calls += 1
        state = Mixer.start(self, state, hidden)
        return state * 1.0 if self.calls % 2 else state


class Asking(Mixer):
    def start(self, state: Tensor | None, hidden: Tensor) -> Tensor:
        state = super().start(state, hidden)
        return state if hidden.abs().max() > 0 else state * 2


class Choosing(Mixer):
    """Reads where a mask is true."""

    def start(self, state: Tensor | None, hidden: Tensor) -> Tensor:
        state = super().start(state, hidden)
        return state + state[state > 100].sum()


class ChoosingByNumbers(Mixer):
    def start(self, state: Tensor | None, hidden: Tensor) -> Tensor:
        return super().start(state, hidden)[:, torch.arange(hidden.shape[-1])]


class Keeping(Mixer):
    """Reads a tensor that nobody would see replaced."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.scale = torch.ones(6)

    def start(self, state: Tensor | None, hidden: Tensor) -> Tensor:
        return super().start(state, hidden) * self.scale


class KeepingABuffer(Mixer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("scale", torch.ones(6))

    def start(self, state: Tensor | None, hidden: Tensor) -> Tensor:
        return super().start(state, hidden) * self.scale


class HurtByPadding(Mixer):
    """Right for any numbers, but not beside NaN."""

    def start(self, state: Tensor | None, hidden: Tensor) -> Tensor:
        state = super().start(state, hidden)
        return state + 0 * state.sum(0, keepdim=True)


def layer_of(mixer: type[Mixer]) -> RecurrentLayer:
    (layer,) = with_graphs(find_recurrent_layers(Toy(mixer), inputs_of))
    return layer


@pytest.mark.parametrize("mixer", [Mixer, Gated, Nested, ForgetsInChunks, ChoosingByNumbers, KeepingABuffer])
def test_what_launches_the_same_is_held(mixer: type[Mixer]) -> None:
    layer = layer_of(mixer)
    assert layer.in_graphs and not layer.mapped and layer.describe().endswith("decoding requests as one batch, in full graphs")


def test_requests_that_a_layer_would_mix_are_mapped() -> None:
    layer = layer_of(MixesRequests)
    assert (layer.batches, layer.mapped, layer.in_graphs) == (True, True, True)
    assert layer.describe().endswith("decoding requests mapped as one batch, in full graphs")


@pytest.mark.parametrize(
    ("mixer", "why"),
    [
        (Counting, r"what it launches depends on more than its tensors: aten\.mul\.Tensor .* in one step, aten\.mul\.Tensor .* in another"),
        (CountingInTensors, r"what it launches depends on more than its tensors: aten\.lift_fresh\.default .*constant"),
        (Branching, r"what it launches depends on more than its tensors: "),
        (Asking, r"it asks for values of a tensor \(aten\._local_scalar_dense\.default\)"),
        (Choosing, r"it asks for values of a tensor \(aten\.index\.Tensor\)"),
        (Keeping, r"it reads a tensor \[6\] in aten\.mul\.Tensor that is neither a parameter nor a buffer of the module"),
        (HurtByPadding, r"with padding it differs by inf"),
        (LooksAtItsRows, r"it decodes requests one by one"),
    ],
)
def test_what_does_not_is_refused_with_the_reason(mixer: type[Mixer], why: str) -> None:
    layer = layer_of(mixer)
    assert not layer.in_graphs and re.match(why, layer.why_not_in_graphs), layer.why_not_in_graphs
    assert f"not in full graphs ({layer.why_not_in_graphs})" in layer.describe()


def test_layers_of_one_kind_are_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paged_attn"):
        layers = with_graphs(find_recurrent_layers(recurrent("mamba"), inputs_of))
        layers += with_graphs(find_recurrent_layers(Toy(Asking), inputs_of))
    assert [layer.in_graphs for layer in layers] == [True, True, True, False]
    assert [record.message for record in caplog.records if "full graphs" in record.message] == [
        "full graphs hold backbone.layers.0.mixer",
        "full graphs leave out mixers.0: it asks for values of a tensor (aten._local_scalar_dense.default)",
    ]


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _sums(rows: Tensor, output: Tensor) -> None:
    output.copy_(mapped(lambda row: row[None].cumsum(1)[0] * row.mean(), rows))


SUMS = define_op("test_mapped_sums(Tensor rows, Tensor(a!) output) -> ()", _sums)


@pytest.mark.parametrize("recorded", [False, True])
def test_mapping_works_inside_an_op_also_while_it_is_recorded(recorded: bool) -> None:
    rows, output = torch.randn(3, 5), torch.empty(3, 5)
    with torch.no_grad():
        if recorded:
            with Passing():
                SUMS(rows, output)
        else:
            SUMS(rows, output)
    torch.testing.assert_close(output, rows.cumsum(1) * rows.mean(1, keepdim=True))


def test_launches_tell_tensors_by_where_they_come_from() -> None:
    def told(value: Tensor, weight: Tensor) -> list[str]:
        with Launches([value], [weight]) as launches:
            (value @ weight).add_(1.5)
        return launches.log

    weight = torch.randn(3, 3)
    first, second = told(torch.randn(2, 3), weight), told(torch.randn(2, 3), weight)
    assert len(first) == 2 and "given 0 [2, 3]" in first[0] and "made 0" in first[1] and "1.5" in first[1]
    assert not first_difference(first, second)
    assert first_difference(first, told(torch.randn(2, 3), torch.randn(3, 3))), "another weight"
    assert first_difference(first, first[:1]) == "2 operations in one step, 1 in another"
    with pytest.raises(NotCapturable, match="neither a parameter nor a buffer"):
        with Launches([], []):
            weight.neg()
