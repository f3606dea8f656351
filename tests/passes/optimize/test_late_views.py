"""Parts of a product are taken where they are first used; whatever is computed or written to stays where it is."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from paged_attn.passes.fx.graph_tools import name_of
from paged_attn.passes.optimize.late_views import make_views_late


class Model(nn.Module):
    def __init__(self, use: Any) -> None:
        super().__init__()
        self.use, self.weight = use, nn.Parameter(torch.randn(24, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Any:
        return self.use(F.linear(x, self.weight), x)


def late(use: Any) -> tuple[list[str], int]:
    """The names of the graph's calls in their order afterwards, and how many were moved; its numbers must be the same."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    x, model = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1)), Model(use)
    expected = torch.compile(model, backend=backend, fullgraph=True)(x.clone())
    (gm,) = found
    moved = make_views_late(gm.graph)
    gm.graph.lint()
    gm.recompile()
    given = [x.clone() if not isinstance(each, nn.Parameter) else each for each in _inputs(gm, model, x)]
    for one, other in zip(gm(*given), expected if isinstance(expected, tuple) else (expected,), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    return [name_of(node) for node in gm.graph.nodes if node.op.startswith("call")], moved


def _inputs(gm: fx.GraphModule, model: Model, x: Tensor) -> list[Any]:
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return [model.weight if isinstance(node.meta["example_value"], nn.Parameter) else x for node in nodes]


def gated(product: Tensor, x: Tensor) -> Tensor:
    """A gate of every other group of columns, copied before what it gates is computed."""
    value, gate = product.view(1, -1, 3, 8).split([4, 4], -1)
    gate = gate.reshape(1, -1, 12)
    return value.reshape(1, -1, 12).exp().cumsum(1) * gate


def test_a_copy_for_later_is_made_later() -> None:
    names, moved = late(gated)
    assert names.index("cumsum") < [i for i, name in enumerate(names) if name == "reshape"][1]
    assert names[-4:] == ["split", "getitem", "reshape", "mul"] and moved > 0, "no tuple is left in an earlier piece"


def test_what_is_computed_or_written_to_stays() -> None:
    def computed(product: Tensor, x: Tensor) -> Tensor:
        gate = product.exp().view(1, -1, 3, 8)[..., 4:].reshape(1, -1, 12)
        return x.cumsum(1).sum(-1, keepdim=True) * gate

    def written(product: Tensor, x: Tensor) -> Tensor:
        first = product[..., :4].clone()
        product.mul_(2)
        return first + product[..., :4]

    assert late(computed)[1] == 0
    assert late(written)[0].index("clone") < late(written)[0].index("mul_")
