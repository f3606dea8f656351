"""Linears that the op for few rows can compute call it; all others stay, and the graph computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn.attn_ops.linear_op import LINEAR
from paged_attn.engine.merged_weights import bind_merged
from paged_attn.passes.few_row_linears import use_few_row_linears
from paged_attn.passes.graph_tools import as_traced, value_of
from paged_attn.passes.merge_linears import merge_linears
from tests.passes.graphs import VOCAB, Traced, trace
from tests.passes.test_merge_linears import copied


class Layers(nn.Module):
    """`use(x, layers)` on x [1, T, 64]; linears a, b (no bias), c (bias), odd (a size of 40)."""

    def __init__(self, use: Callable[[Tensor, Any], Tensor], dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use = use
        self.embed = nn.Embedding(VOCAB, 64)
        self.a, self.b, self.odd = (nn.Linear(64, n, bias=False) for n in (64, 128, 40))
        self.c = nn.Linear(64, 192)
        self.to(dtype)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) * torch.cos(position_ids[..., None] * 0.1).to(self.embed.weight.dtype)
        return self.use(x, self)


def replaced(module: nn.Module, *, merge: bool = False, device_type: str = "cpu") -> int:
    """How many linears were replaced; the graph must compute what it did."""

    def work(traced: Traced) -> list[int]:
        gm, form, values = copied(traced)
        expected = traced.gm.forward(*map(as_traced, traced.args))[0].clone()
        merges = merge_linears(gm.graph, form, values, module) if merge else ()
        before = {node: value_of(node).shape for node in gm.graph.nodes if node.target is F.linear}
        count = use_few_row_linears(gm.graph, form, values, device_type)
        gm.graph.lint()
        gm.recompile()
        found = [node for node in gm.graph.nodes if node.target is LINEAR]
        assert len(found) == count == len(before) - sum(node.target is F.linear for node in gm.graph.nodes)
        for node in found:
            fake = LINEAR(*(value_of(arg) for arg in node.args))
            assert value_of(node).shape == fake.shape and value_of(node).dtype == fake.dtype
        result = gm.forward(*map(as_traced, bind_merged(traced.args, merges)))[0]
        torch.testing.assert_close(result, expected, atol=2e-2, rtol=2e-2) if merge else torch.testing.assert_close(result, expected, atol=0, rtol=0)
        return [count]

    return trace(module, work).result[0]  # type: ignore[no-any-return]


def test_linears_with_and_without_bias_are_replaced() -> None:
    assert replaced(Layers(lambda x, m: m.a(m.c(x)[..., :64]) + m.b(x)[..., 64:])) == 3


def test_keywords_are_read() -> None:
    assert replaced(Layers(lambda x, m: F.linear(input=x, weight=m.a.weight) + F.linear(x, m.c.weight, bias=m.c.bias)[..., :64])) == 2


def test_float16_and_rows_picked_before() -> None:
    assert replaced(Layers(lambda x, m: m.a(x[:, -1:]) + m.a(x[0])[-1], torch.float16)) == 2


def test_merged_linears_have_the_merged_size() -> None:
    """`odd` alone is no multiple of 64; with b and 24 others it would be one."""
    assert replaced(Layers(lambda x, m: torch.cat([m.a(x), m.b(x)], -1)), merge=True) == 1
    assert replaced(Layers(lambda x, m: torch.cat([m.a(x), m.odd(x)], -1)), merge=True) == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda x, m: m.odd(x),
        lambda x, m: F.linear(x, m.a.weight * 2),
        lambda x, m: F.linear(x, m.a.weight.t()),
        lambda x, m: F.linear(x, m.a.weight, m.a.weight[0] * 1),
        lambda x, m: F.linear(x[0].unflatten(-1, (2, 32)).flatten(1).expand(3, -1, -1), m.a.weight),
        lambda x, m: m.a(x[None]),
    ],
)
def test_what_the_op_does_not_compute_stays(use: Callable[[Tensor, Any], Tensor]) -> None:
    assert replaced(Layers(use)) == 0


def test_other_dtypes_and_devices_stay() -> None:
    assert replaced(Layers(lambda x, m: m.a(x), torch.float32)) == 0
    assert replaced(Layers(lambda x, m: m.a(x)), device_type="cuda") == 0


def test_a_weight_that_the_graph_writes_stays() -> None:
    class Writing(Layers):
        def __init__(self) -> None:
            super().__init__(lambda x, m: F.linear(x, m.table) + m.a(x))
            self.register_buffer("table", torch.zeros(64, 64, dtype=torch.bfloat16))

        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            self.table.fill_(0.5)
            return super().forward(input_ids, position_ids)

    assert replaced(Writing()) == 1
