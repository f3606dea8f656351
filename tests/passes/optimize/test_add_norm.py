"""A residual addition and an RMS norm, in any spelling, go into the product behind them; whatever else looks like them stays."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.ops.linears.add_norm import ADD_NORM, ADD_NORM_LINEAR
from paged_attn.attn_ops.ops.linears.linear import LINEAR
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import source_name
from paged_attn.passes.optimize.linears.add_norm import fuse_add_norm, separate_norms
from paged_attn.passes.optimize.linears.gemv import use_gemv
from tests.oracle import greedy, random_prompts
from tests.tiny_models import build

Use = Callable[[Tensor, "Layer"], Any]
EPS, WIDTH = 1e-5, 16


class Layer(nn.Module):
    def __init__(self, use: Use, dtype: torch.dtype) -> None:
        super().__init__()
        self.use = use
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Parameter(torch.randn(WIDTH, WIDTH).to(dtype)) for _ in range(3))
        self.scale, self.bias = (nn.Parameter(torch.rand(WIDTH).to(dtype) + 0.5) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        return self.use(x, self)


def rewritten(use: Use, dtype: torch.dtype = torch.float32) -> tuple[int, fx.GraphModule, list[Any]]:
    """The number of norms that went into a product; the graph of `use` of x [1, T, 16], T symbolic, and its inputs of T = 5."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        found.append((gm, [each.node.hint if isinstance(each, torch.SymInt) else each for each in inputs]))
        return gm.forward

    torch._dynamo.reset()
    x = torch.randn(1, 5, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch._dynamo.mark_dynamic(x, 1)
    torch.compile(Layer(use, dtype), backend=backend, fullgraph=True)(x)
    gm, inputs = found[0]
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    form = CallForm("T", {node: "owned" if "_parameters" in source_name(node) else "x" for node in placeholders}, "")  # type: ignore[arg-type]
    use_gemv(gm.graph, form)
    count = fuse_add_norm(gm.graph, form)
    gm.graph.lint()
    gm.recompile()
    return count, gm, inputs


def calls(gm: fx.GraphModule, op: Any) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=op)


def added(x: Tensor, own: Layer) -> Tensor:
    return x + F.linear(x, own.first)


def as_llama(x: Tensor, scale: Tensor, eps: float = EPS) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return scale * wide.to(x.dtype)


def as_gemma(x: Tensor, scale: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + scale.float())).type_as(x)


def by_division(x: Tensor, scale: Tensor) -> Tensor:
    wide = x.float()
    return (wide / torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + EPS)).to(x.dtype) * scale


def by_torch(x: Tensor, scale: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), scale, EPS)


NORMS = [as_llama, as_gemma, by_division, by_torch]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", NORMS)
def test_spellings(norm: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    """The residual goes on, too; with one row, for which the graph was not traced, as with five."""

    def use(x: Tensor, own: Layer) -> Any:
        total = added(x, own)
        return F.linear(norm(total, own.scale), own.second, own.bias), total + 1

    count, gm, inputs = rewritten(use, dtype)
    (node,) = calls(gm, ADD_NORM_LINEAR)
    assert count == 1 and node.args[3:5] == (EPS, float(norm is as_gemma)) and node.args[7] is False
    limit = 1e-5 if dtype == torch.float32 else 0.06
    for rows in (5, 1):
        given = [
            each[:, :rows] if isinstance(each, Tensor) and each.dim() == 3 else rows if isinstance(each, int) else each for each in inputs
        ]
        expected = Layer(use, dtype)(next(each for each in given if isinstance(each, Tensor) and each.dim() == 3))
        for got, wanted in zip(gm(*given), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=limit, atol=limit)


def test_what_else_reads_the_norm() -> None:
    """As a router and the experts behind it do: another linear, in another shape, and anything else."""

    def use(x: Tensor, own: Layer) -> Any:
        normed = as_llama(added(x, own), own.scale)
        flat = normed.view(-1, WIDTH)
        return F.linear(flat.reshape(-1, WIDTH), own.second), F.linear(normed, own.third), flat.relu()

    count, gm, inputs = rewritten(use)
    (node,) = calls(gm, ADD_NORM_LINEAR)
    assert count == 1 and node.args[7] is True and len(calls(gm, LINEAR)) == 2
    x = next(each for each in inputs if isinstance(each, Tensor) and each.dim() == 3)
    for got, wanted in zip(gm(*inputs), Layer(use, torch.float32)(x), strict=True):
        torch.testing.assert_close(got, wanted)


def test_one_norm_after_another() -> None:
    """The sum of the second is of the first's, which the op has stored."""

    def use(x: Tensor, own: Layer) -> Any:
        first = added(x, own)
        second = first + F.linear(as_llama(first, own.scale), own.second)
        return F.linear(as_gemma(second, own.bias), own.third)

    count, gm, inputs = rewritten(use)
    assert count == 2 and not any(node.target is operator.add for node in gm.graph.nodes)
    separate_norms(gm.graph)
    gm.recompile()
    assert len(calls(gm, ADD_NORM)) == 2 and len(calls(gm, LINEAR)) == 3 and not calls(gm, ADD_NORM_LINEAR)
    x = next(each for each in inputs if isinstance(each, Tensor) and each.dim() == 3)
    torch.testing.assert_close(gm(*inputs)[0], Layer(use, torch.float32)(x))


def layer_norm(x: Tensor, own: Layer) -> Tensor:
    return F.layer_norm(added(x, own), (WIDTH,), own.scale, None, EPS)


def centred(x: Tensor, own: Layer) -> Tensor:
    total = added(x, own)
    return as_llama(total - total.mean(-1, keepdim=True), own.scale)


def over_tokens(x: Tensor, own: Layer) -> Tensor:
    total = added(x, own)
    return total * torch.rsqrt(total.pow(2).mean((1, 2), keepdim=True) + EPS) * own.scale


def eps_outside(x: Tensor, own: Layer) -> Tensor:
    total = added(x, own)
    return total / (total.pow(2).mean(-1, keepdim=True).sqrt() + EPS) * own.scale


def two_scales(x: Tensor, own: Layer) -> Tensor:
    return as_llama(added(x, own), own.scale) * own.bias


def scaled_term(x: Tensor, own: Layer) -> Tensor:
    return as_llama(x + 0.5 * F.linear(x, own.first), own.scale)


def no_sum(x: Tensor, own: Layer) -> Tensor:
    return as_llama(F.linear(x, own.first), own.scale)


def written_in_place(x: Tensor, own: Layer) -> Tensor:
    total = added(x, own)
    normed = as_llama(total, own.scale)
    total.mul_(2)
    return normed


def written_weights(x: Tensor, own: Layer) -> Tensor:
    normed = as_llama(added(x, own), own.scale)
    own.second.detach().mul_(2)
    return normed


@pytest.mark.parametrize(
    "use", [layer_norm, centred, over_tokens, eps_outside, two_scales, scaled_term, no_sum, written_in_place, written_weights]
)
def test_left_alone(use: Use) -> None:
    count, gm, _ = rewritten(lambda x, own: F.linear(use(x, own), own.second))
    assert count == 0 and not calls(gm, ADD_NORM_LINEAR)


@pytest.mark.parametrize(("kind", "norms"), [("llama", 6), ("mixtral", 6), ("qwen3_moe", 6), ("gemma3_text", 0)])
def test_models(kind: str, norms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three layers all norms but the first, which has no sum, or none: the model's own tokens."""
    model, counts = build(kind), []
    run = fuse_add_norm
    monkeypatch.setattr("paged_attn.passes.pass_list.fuse_add_norm", lambda *given: counts.append(run(*given)) or counts[-1])
    prompts = random_prompts((3, 9))
    with LLM(model, gemv=True, max_loras=1) as llm:
        got = [each.token_ids for each in llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))]
    assert [list(each) for each in got] == [greedy(model, prompt, 6) for prompt in prompts] and counts[0] == norms
