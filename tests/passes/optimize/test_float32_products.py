"""Routers' products of casts to float32 take their tensors as they are; whatever else looks like them stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from paged_attn import LLM, SamplingParams, explain
from paged_attn.attn_ops.ops.linears.linear import LINEAR_FLOAT32
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import source_name
from paged_attn.passes.optimize.linears.float32_products import use_linear_float32
from tests.oracle import greedy, random_prompts
from tests.tiny_models import build

Use = Callable[[Tensor, "Router"], Any]
F32 = torch.float32


class Router(nn.Module):
    def __init__(self, use: Use, dtype: torch.dtype) -> None:
        super().__init__()
        self.use = use
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 16).to(dtype))
        self.square = nn.Parameter(torch.randn(16, 16).to(dtype))
        self.lying = nn.Parameter(torch.randn(16, 6).to(dtype))
        self.register_buffer("table", torch.randn(6, 16).to(dtype))
        self.bias = nn.Parameter(torch.randn(6))
        self.half_bias = nn.Parameter(torch.randn(6).to(dtype))
        self.scale = nn.Parameter(torch.randn(16).to(dtype))

    def forward(self, x: Tensor) -> Any:
        return self.use(x, self)


def traced(use: Use, dtype: torch.dtype = torch.bfloat16, dynamic: bool = True) -> tuple[fx.GraphModule, CallForm, list[Any]]:
    """The graph of a use of x [1, T, 16] with T symbolic, its form, and its inputs of T = 5."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        found.append((gm, [each.node.hint if isinstance(each, torch.SymInt) else each for each in inputs]))
        return gm.forward

    torch._dynamo.reset()
    torch.manual_seed(1)
    x = torch.randn(1, 5, 16).to(dtype)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 1)
    torch.compile(Router(use, dtype), backend=backend, fullgraph=True)(x)
    gm, inputs = found[0]
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    roles = {node: "owned" if "_parameters" in source_name(node) or "_buffers" in source_name(node) else "x" for node in placeholders}
    return gm, CallForm("T", roles, ""), inputs  # type: ignore[arg-type]


def rewritten(use: Use, **how: Any) -> tuple[int, fx.GraphModule, list[Any]]:
    gm, form, inputs = traced(use, **how)
    count = use_linear_float32(gm.graph, form, dict(zip((n for n in gm.graph.nodes if n.op == "placeholder"), inputs, strict=True)))
    gm.graph.lint()
    gm.recompile()
    return count, gm, inputs


def calls(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target is LINEAR_FLOAT32]


def by_linear(x: Tensor, own: Router) -> Tensor:
    return F.linear(x.type(F32), own.weight.type(F32))


def by_rows(x: Tensor, own: Router) -> Tensor:
    return F.linear(x.view(-1, 16).float(), weight=own.weight.to(dtype=F32), bias=own.bias)


def by_matmul(x: Tensor, own: Router) -> Tensor:
    return x.float() @ own.weight.float().t()


def by_matmul_of_the_turned(x: Tensor, own: Router) -> Tensor:
    return torch.matmul(x.to(F32), own.table.T.to(F32))


def by_mm(x: Tensor, own: Router) -> Tensor:
    return x[0].float().mm(own.weight.float().transpose(0, 1).contiguous())


def by_addmm(x: Tensor, own: Router) -> Tensor:
    return torch.addmm(own.half_bias.float(), x.squeeze(0).float(), own.weight.permute(1, 0).float())


def by_a_square(x: Tensor, own: Router) -> Tensor:
    return x.float() @ own.square.float().T


SPELLINGS = [by_linear, by_rows, by_matmul, by_matmul_of_the_turned, by_mm, by_addmm, by_a_square]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("use", SPELLINGS)
def test_every_spelling_is_one_op_and_casts_nothing_of_16_bits(use: Use, dtype: torch.dtype) -> None:
    gm, _, inputs = traced(use, dtype)
    expected = gm(*inputs)
    count, gm, inputs = rewritten(use, dtype=dtype)
    (call,) = calls(gm)
    assert count == 1
    assert all(isinstance(each, fx.Node) and each.meta["example_value"].dtype == dtype for each in call.args[:2])
    (got,) = gm(*inputs)
    assert got.dtype == F32 and got.shape == expected[0].shape
    torch.testing.assert_close(got, expected[0], rtol=0, atol=1e-5)
    assert sum(node.target in ("float", "type", "to") for node in gm.graph.nodes) == (use is by_addmm), "the bias's cast alone is left"


def with_another_user(x: Tensor, own: Router) -> tuple[Tensor, Tensor]:
    cast = x.float()
    return F.linear(cast, own.weight.float()), cast * 2


def twice(x: Tensor, own: Router) -> tuple[Tensor, Tensor]:
    cast = x.float()
    return F.linear(cast, own.weight.float()), cast @ own.table.float().t()


def test_a_cast_stays_for_its_other_users() -> None:
    gm, _, inputs = traced(with_another_user)
    expected = gm(*inputs)
    count, gm, inputs = rewritten(with_another_user)
    assert count == 1 and sum(node.target == "float" for node in gm.graph.nodes) == 1
    assert torch.equal(gm(*inputs)[1], expected[1])
    count, gm, _ = rewritten(twice)
    assert count == 2 and not any(node.target == "float" for node in gm.graph.nodes)


def computes_the_weight(x: Tensor, own: Router) -> Tensor:
    return F.linear(x.float(), (own.weight * 2).float())


def of_tokens(x: Tensor, own: Router) -> Tensor:
    return x[0].float() @ x[0].float().t()


def casts_x_alone(x: Tensor, own: Router) -> Tensor:
    return F.linear(x.float(), own.bias[:, None].expand(6, 16))


def scales_after_the_cast(x: Tensor, own: Router) -> Tensor:
    return F.linear(x.float() * own.scale.float(), own.weight.float())


def does_not_turn_a_square(x: Tensor, own: Router) -> Tensor:
    return x.float() @ own.square.float()


def lies_otherwise(x: Tensor, own: Router) -> Tensor:
    return x.float() @ own.lying.float()


def in_double(x: Tensor, own: Router) -> Tensor:
    return F.linear(x.double(), own.weight.double())


def in_16_bits(x: Tensor, own: Router) -> Tensor:
    return F.linear(x, own.weight).float()


def scales_the_product(x: Tensor, own: Router) -> Tensor:
    return torch.addmm(own.bias, x[0].float(), own.weight.float().t(), alpha=2)


def writes_to_the_cast(x: Tensor, own: Router) -> Tensor:
    cast = x.float()
    cast.add_(1)
    return F.linear(cast, own.weight.float())


def writes_to_x(x: Tensor, own: Router) -> Tensor:
    x = x * 2
    cast = x.float()
    x[:, :1].zero_()
    return F.linear(cast, own.weight.float()) + x.sum()


def writes_to_the_weight(x: Tensor, own: Router) -> Tensor:
    own.table.mul_(2)
    return F.linear(x.float(), own.table.float())


STAY = [computes_the_weight, of_tokens, casts_x_alone, scales_after_the_cast, does_not_turn_a_square, lies_otherwise, in_double, in_16_bits,
        scales_the_product, writes_to_the_cast, writes_to_x, writes_to_the_weight]  # fmt: skip


@pytest.mark.parametrize("use", STAY)
def test_what_is_something_else_stays(use: Use) -> None:
    gm, _, _ = traced(use)
    before = [node.name for node in gm.graph.nodes]
    count, gm, _ = rewritten(use)
    assert count == 0 and [node.name for node in gm.graph.nodes] == before


def test_what_is_written_after_the_product_or_before_the_cast_hinders_nothing() -> None:
    def use(x: Tensor, own: Router) -> Tensor:
        x = x * 2
        x[:, :1].zero_()
        logits = F.linear(x.float(), own.weight.float())
        x.add_(1)
        return logits + x.sum()

    gm, _, inputs = traced(use)
    expected = gm(*inputs)
    count, gm, inputs = rewritten(use)
    assert count == 1
    assert torch.equal(gm(*inputs)[0], expected[0])


@pytest.mark.parametrize("how", [{"dtype": torch.float32}, {"dynamic": False}])
def test_float32_models_and_products_of_one_size_stay(how: Any) -> None:
    assert rewritten(by_linear, **how)[0] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("biased", [True, False])
def test_the_op_is_the_models_own_product_on_a_cpu(dtype: torch.dtype, rows: int, biased: bool) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(1, rows, 16).to(dtype), torch.randn(6, 16).to(dtype), torch.randn(6) if biased else None
    assert torch.equal(LINEAR_FLOAT32(x, weight, bias), F.linear(x.float(), weight.float(), bias))
    torch.library.opcheck(LINEAR_FLOAT32, (x, weight, bias), test_utils=("test_schema", "test_faketensor"))


def rewrite_of(llm: LLM) -> Any:
    return llm.engine.runner.compiled.rewrite  # type: ignore[attr-defined]


def deepseek() -> Any:
    """All in bf16; transformers 5.24 keeps the weights of these routers in float32 unless they are moved."""
    model = build("deepseek_v3", dtype=torch.bfloat16)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.weight.data = module.weight.data.bfloat16()
    return model


def test_routers_of_deepseek_v3_take_bf16() -> None:
    model = deepseek()
    prompts = random_prompts((5, 17))
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    with LLM(model, num_pages=32) as llm:
        found = rewrite_of(llm)
        assert found.counts["linear_float32"] == len(calls(found.gm)) == found.counts["routing"] == 2
        assert "2 products in float32 take tensors in 16 bits as they are" in explain(llm)
        got = [c.token_ids for c in llm.generate(prompts, params)]
    with LLM(model, num_pages=32, disable_passes=("linear_float32",)) as llm:
        assert rewrite_of(llm).counts["linear_float32"] == 0
        assert [c.token_ids for c in llm.generate(prompts, params)] == got


def test_deterministic_engines_keep_the_models_own_product() -> None:
    with LLM(deepseek(), num_pages=16, deterministic=True) as llm:
        assert rewrite_of(llm).counts["linear_float32"] == 0


def test_float32_models_are_untouched() -> None:
    model = build("deepseek_v3")
    (prompt,) = random_prompts((9,))
    with LLM(model, num_pages=16) as llm:
        assert rewrite_of(llm).counts["linear_float32"] == 0
        assert llm.generate([prompt], SamplingParams(max_new_tokens=6))[0].token_ids == greedy(model, prompt, 6)
