"""Convolutions read columns where they lie, delta rules read keys before they were repeated; what only looks like it stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.ops.scans import GATED_DELTA_RULE, SHORT_CONV
from paged_attn.attn_ops.scans.short_conv import channels_in
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.memory import remove_dead_code
from paged_attn.passes.optimize.scan_operands import read_columns_in_place, read_unrepeated_heads
from tests.oracle import greedy, random_prompts
from tests.recurrent_models import recurrent

Make = Callable[[Tensor], Any]
GROUPS, KEYS, VALUES = 4, 8, 16  # a group of 48 columns: query, key, value, gate


class Layer(nn.Module):
    def __init__(self, make: Make, op: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.make, self.op = make, op
        self.proj = nn.Linear(8, GROUPS * 2 * (KEYS + VALUES), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.make(self.proj(x)))


def convolved(x: Tensor) -> Tensor:
    """x [1, C, T], as transformers' layers hand it over."""
    rows = x[0].transpose(0, 1)
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    weight = torch.ones(rows.shape[1], 4)
    SHORT_CONV(rows, weight, None, output, "silu", [], 3, 1)
    return output


def ruled(given: tuple[Tensor, Tensor]) -> Tensor:
    query, key = given
    value = torch.ones(query.shape[1], 8, VALUES)
    output = torch.empty_like(value)
    GATED_DELTA_RULE(query[0], key[0], value, value[..., 0], value[..., 0], output, True, 3, 1)
    return output


def traced(make: Make, op: Callable[[Any], Tensor]) -> tuple[fx.GraphModule, CallForm, fx.Node]:
    """The graph with T symbolic, its form, and the node that projects."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        found.append(gm)
        return lambda *args: [torch.zeros(1)]

    torch._dynamo.reset()
    x = torch.randn(1, 5, 8)
    torch._dynamo.mark_dynamic(x, 1)
    with torch.no_grad():
        torch.compile(Layer(make, op), backend=backend, fullgraph=True)(x)
    gm = found[0]
    (linear,) = [node for node in gm.graph.nodes if getattr(node.target, "__name__", "") == "linear"]
    tokens = next(size for node in gm.graph.nodes if (value := node.meta.get("example_value")) is not None and isinstance(value, Tensor)
                  for size in value.shape if isinstance(size, torch.SymInt))  # fmt: skip
    return gm, CallForm(tokens.node.expr, {}, ""), linear  # type: ignore[arg-type]


def split(y: Tensor) -> list[Tensor]:
    return list(torch.split(y.view(*y.shape[:2], GROUPS, 2 * (KEYS + VALUES)), [KEYS, KEYS, VALUES, VALUES], 3))


def flat(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:2], -1)


def of_groups(y: Tensor) -> Tensor:
    query, key, value, _ = split(y)
    value = value.reshape(*value.shape[:2], -1, 8)
    return torch.cat([flat(each) for each in (query, key, value)], -1).transpose(1, 2)


def in_halves(y: Tensor) -> Tensor:
    return torch.cat((y[..., 96:], y[..., :96]), -1).transpose(1, 2)


MOVED = {
    "groups": (of_groups, [0, 4, 48, 8, 8, 4, 48, 8, 16, 4, 48, 16]),
    "halves": (in_halves, [96, 1, 0, 96, 0, 1, 0, 96]),
    "a part": (lambda y: torch.cat((y[..., 8:24], y[..., 32:48]), 2).transpose(1, 2), [8, 2, 24, 16]),
}
STAYS: dict[str, Make] = {
    "a view": lambda y: y[..., 8:40].transpose(1, 2),
    "computes": lambda y: torch.cat((y[..., :8] * 2, y[..., 8:16]), -1).transpose(1, 2),
    "another row": lambda y: torch.cat((y[..., :8], y.flip(1)[..., 8:16]), -1).transpose(1, 2),
    "rows of both": lambda y: torch.cat((y[..., :96], y[..., 96:]), 1)[:, 1 : y.shape[1] + 1].transpose(1, 2),
    "many parts": lambda y: torch.cat([y[..., i : i + 8] for i in range(88, 0, -8)], -1).transpose(1, 2),
    "single columns": lambda y: torch.cat([y[..., i : i + 1] for i in (7, 3, 5)], 2).transpose(1, 2),
    "several results": lambda y: torch.cat(torch.tensor_split(y, 2, -1)[::-1], -1).transpose(1, 2),
    "twice": lambda y: torch.cat((y[..., :64], y[..., 32:96]), -1).transpose(1, 2),
    "twice all": lambda y: torch.cat((y, y), -1).transpose(1, 2),
    "another source": lambda y: torch.cat((y[..., :8], torch.zeros_like(y[..., :8])), -1).transpose(1, 2),
}


@pytest.mark.parametrize("name", MOVED)
def test_columns_are_read_where_they_lie(name: str) -> None:
    make, columns = MOVED[name]
    gm, form, linear = traced(make, convolved)
    assert read_columns_in_place(gm.graph, form) == 1
    remove_dead_code(gm.graph)
    gm.graph.lint()
    (op,) = [node for node in gm.graph.nodes if node.target is SHORT_CONV]
    assert op.args[5] == columns and op.args[6:] == (3, 1)
    assert op.args[0].args[0] is linear and not [node for node in gm.graph.nodes if getattr(node.target, "__name__", "") == "cat"]
    y = torch.randn(1, 7, linear.meta["example_value"].shape[-1])
    expected = make(y)[0].transpose(0, 1)
    for rows in (y[0], torch.cat((y, y), -1)[0, :, y.shape[2] :]):
        assert torch.equal(torch.cat([part.flatten(1) for part in channels_in(rows, op.args[5])], 1), expected)
    assert op.args[3].meta["example_value"].shape[1] == expected.shape[1]


@pytest.mark.parametrize("name", STAYS)
def test_what_only_looks_like_it_stays(name: str) -> None:
    gm, form, _ = traced(STAYS[name], convolved)
    assert read_columns_in_place(gm.graph, form) == 0
    (op,) = [node for node in gm.graph.nodes if node.target is SHORT_CONV]
    assert op.args[5] == []


def test_what_is_written_on_the_way_stays() -> None:
    def make(y: Tensor) -> Tensor:
        x = of_groups(y)
        y[..., :4] = 0.0
        return x

    gm, form, _ = traced(make, convolved)
    assert read_columns_in_place(gm.graph, form) == 0


REPEATED: dict[str, Callable[[Tensor], Tensor]] = {
    "repeat_interleave": lambda x: x.repeat_interleave(2, 2),
    "expand": lambda x: x[:, :, :, None].expand(-1, -1, -1, 2, -1).reshape(*x.shape[:2], 8, KEYS),
    "transposed": lambda x: x.transpose(1, 2).repeat_interleave(2, 1).transpose(1, 2),
}


@pytest.mark.parametrize("name", REPEATED)
def test_keys_are_read_before_they_are_repeated(name: str) -> None:
    gm, form, _ = traced(lambda y: [REPEATED[name](each) for each in split(y)[:2]], ruled)
    assert read_unrepeated_heads(gm.graph, form) == 1
    remove_dead_code(gm.graph)
    gm.graph.lint()
    (op,) = [node for node in gm.graph.nodes if node.target is GATED_DELTA_RULE]
    assert [tuple(each.meta["example_value"].shape[1:]) for each in op.args[:2]] == [(GROUPS, KEYS)] * 2
    assert not [node for node in gm.graph.nodes if "repeat" in str(node.target) or "expand" in str(node.target)]


@pytest.mark.parametrize(
    "make",
    [
        lambda y: [each.repeat(1, 1, 2, 1) for each in split(y)[:2]],
        lambda y: [split(y)[0].repeat_interleave(2, 2) * 2, split(y)[1].repeat_interleave(2, 2)],
        lambda y: [split(y)[0].repeat_interleave(2, 2), flat(split(y)[2]).view(*y.shape[:2], 8, 8)],
    ],
    ids=["another order", "one computes", "one has as many"],
)  # fmt: skip
def test_other_heads_stay(make: Make) -> None:
    gm, form, _ = traced(make, ruled)
    assert read_unrepeated_heads(gm.graph, form) == 0


def test_a_model_gives_its_tokens() -> None:
    model = recurrent("qwen3_next")
    prompts = random_prompts((3, 17, 40, 1))
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    with LLM(model, max_batch_tokens=32, max_requests=4, num_pages=64) as llm:
        assert [each.token_ids for each in llm.generate(prompts, SamplingParams(max_new_tokens=12))] == expected
