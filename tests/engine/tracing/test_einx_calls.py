"""einx's operations on elements with a symbolic number of tokens, compared with einx on real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from paged_attn.engine.tracing.einx_calls import any_length

einx = pytest.importorskip("einx", reason="x-transformers brings it")
SIZES = {"b": 2, "h": 3, "i": 4, "j": 5, "n": 6}
HELD = [
    ("subtract", "j, i -> i j", "j", "i"),
    ("subtract", "... j, ... i -> ... i j", "b h j", "b h i"),
    ("subtract", "i, j -> 1 1 i j", "i", "j"),
    ("multiply", "b n h, b h n i -> b h n i", "b n h", "b h n i"),
    ("multiply", "b n i, n", "b n i", "n"),
    ("add", "b n i, j i -> (b j) n i", "b n i", "j i"),
    ("add", "i, j, n -> n (j i)", "i", "j", "n"),
    ("add", "i ..., h ... -> (h i) ...", "i b n", "h b n"),
    ("less", "j, i -> i j", "j", "i"),
    ("maximum", "i j, j", "i j", "j"),
    ("logical_and", "i, j -> j i", "i", "j"),
    ("where", "b n, b n i, -> b n i", "b n", "b n i", None),
    ("divide", "i, -> i", "i", None),
]
LEFT_TO_EINX = [
    ("add", "i [j], [j] -> i [j]", "i j", "j"),
    ("add", "(b h) i, b -> b h i", "b h i", "b"),  # an axis in two, in what is given
    ("add", "i, j", "i", "j"),  # einx refuses it
    ("add", "i i, i -> i", "i i", "i"),
    ("add", "1 i, j -> j i", "i", "j"),
    ("add", "i j, j -> i j", "i", "j"),  # too few axes
    ("add", "i ..., h -> h i", None, "h"),
]


def given(axes: str | None, logical: bool) -> Any:
    if axes is None:
        return 2.0
    value = torch.randn([SIZES[name] for name in axes.split()])
    return value > 0 if logical else value


def inputs_of(op: str, inputs: tuple[str | None, ...]) -> list[Any]:
    torch.manual_seed(0)
    return [given(axes, op == "logical_and" or (op == "where" and not index)) for index, axes in enumerate(inputs)]


@pytest.mark.parametrize(("op", "pattern", "inputs"), [(op, pattern, inputs) for op, pattern, *inputs in HELD], ids=str)
def test_values_are_those_of_einx(op: str, pattern: str, inputs: list[str | None]) -> None:
    values = inputs_of(op, tuple(inputs))
    theirs = getattr(einx, op)
    expected = theirs(pattern, *values)
    with any_length():
        ours = getattr(einx, op)
        assert ours is not theirs
        torch.testing.assert_close(ours(pattern, *values), expected, rtol=0, atol=0)
    assert getattr(einx, op) is theirs


@pytest.mark.parametrize(("op", "pattern", "inputs"), [(op, pattern, inputs) for op, pattern, *inputs in LEFT_TO_EINX], ids=str)
def test_other_patterns_go_to_einx(op: str, pattern: str, inputs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def theirs(pattern: str, *_: Any) -> None:
        calls.append(pattern)

    monkeypatch.setattr(einx, op, theirs)
    with any_length():
        getattr(einx, op)(pattern, *inputs_of(op, tuple(inputs)))
    assert calls == [pattern]


def test_a_trace_holds_them_for_any_length() -> None:
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def distances(x: Tensor) -> Tensor:
        at = torch.arange(x.shape[0])
        return einx.multiply("i j, j -> i j", -einx.subtract("j, i -> i j", at, at).abs(), x)  # type: ignore[no-any-return]

    x = torch.randn(7)
    torch._dynamo.mark_dynamic(x, 0)
    with any_length():
        torch.compile(distances, backend=keep, fullgraph=True)(x)
    longer = torch.randn(19)
    symbols = [node for node in graphs[0].graph.nodes if node.op == "placeholder"]
    (result,) = graphs[0](*[longer if "x" in node.name.lower() else 19 for node in symbols])
    torch.testing.assert_close(result, distances(longer))
