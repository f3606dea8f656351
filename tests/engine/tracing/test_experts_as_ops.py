"""Modules of experts are found, proved on numbers, and one op each in the graph; what computes something else stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.engine.tracing.experts_as_ops import experts_as_ops, is_experts, kind_of, loud, proved_experts
from paged_attn.engine.tracing.looping import as_ops
from tests.oracle import greedy, random_prompts
from tests.zoo.build import build


def experts_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_experts(module)]


@pytest.mark.parametrize(
    ("model_type", "gating"),
    [
        ("qwen3_moe", Gating()),
        ("gpt_oss", Gating("silu", True, True, 7.0, 1.702)),
        ("inkling2_text", Gating("silu", gate_softcap=4.0, up_softcap=25.0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_module_computes_is_found_on_numbers(model_type: str, gating: Gating, dtype: torch.dtype) -> None:
    first, *_ = experts_of(build(model_type).to(dtype))
    found = proved_experts(first)
    assert found is not None and found.gating == gating and found.backend.name == "one_by_one"


class Cosine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cos()


CHANGES: dict[str, Any] = {
    "another gate": lambda m: setattr(m, "_apply_gate", lambda both: both.chunk(2, -1)[0].sin() * both.chunk(2, -1)[1]),
    "an activation that nobody knows": lambda m: setattr(m, "act_fn", Cosine()),
    "a forward of its own": lambda m: setattr(m, "forward", lambda x, ids, weights: type(m).forward(m, x, ids, weights) * 1.01),
    "an expert that is skipped": lambda m: setattr(m, "forward", lambda x, ids, weights: type(m).forward(m, x, ids, weights * (ids != 1))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_computes_something_else_is_left_alone(change: str) -> None:
    model = build("qwen3_moe")
    for module in experts_of(model):
        CHANGES[change](module)
    with experts_as_ops(model) as count:
        assert count == 0


def with_outliers(model_type: str, dtype: torch.dtype) -> Any:
    """One channel of the results is a hundred times as large as the others, as training leaves some: a row is long or short with it."""
    first, *_ = experts_of(build(model_type))
    with torch.no_grad():
        first.down_proj.select(2 if model_type == "gpt_oss" else 1, 3).mul_(100)
    return first.to(dtype)


def with_scales(model_type: str, dtype: torch.dtype) -> Any:
    """Experts of very different sizes, the first one the smallest: small enough that float16 has few numbers for its results."""
    first, *_ = experts_of(build(model_type))
    with torch.no_grad():
        for weights in (first.gate_up_proj, first.down_proj):
            weights.mul_(torch.logspace(-2, 0.7, len(weights))[:, None, None])
    return first.to(dtype)


@pytest.mark.parametrize("trained", [with_outliers, with_scales])
@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_as_training_leaves_them_are_no_other_gate(trained: Any, model_type: str, dtype: torch.dtype) -> None:
    module = trained(model_type, dtype)
    assert proved_experts(module) is not None
    forward = type(module).forward
    for change in (lambda x, ids, weights: forward(module, x, ids, weights) * 1.05,
                   lambda x, ids, weights: forward(module, x, ids, weights * (ids != 0))):  # fmt: skip
        module.forward = change
        assert proved_experts(module) is None


def test_how_loud_rows_must_be_takes_no_copy_of_all_experts() -> None:
    w1 = torch.ones(64, 16, 32, dtype=torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        assert loud(w1) > 1
    assert 0 < max(event.self_cpu_memory_usage for event in seen.events()) <= 4 * w1[0].nbytes


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v2", "inkling2_text"])
def test_the_models_own_tokens_through_one_op_a_layer(model_type: str) -> None:
    model, prompts = build(model_type, num_hidden_layers=2), random_prompts((1, 5, 17))
    before = [module.forward for module in experts_of(model)]
    with LLM(model, num_pages=64, max_batch_tokens=16) as llm:
        graph = llm.engine.runner.compiled.rewrite.gm.graph
        assert sum(node.target is EXPERTS for node in graph.nodes) == len(before) > 0
        got = llm.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert [completion.token_ids for completion in got] == [greedy(model, prompt, 8) for prompt in prompts]
    assert [module.forward for module in experts_of(model)] == before


class Looping(nn.Module):
    """Experts as remote code has them: names of its own, nothing that says how the weights lie, a loop over what was chosen."""

    def __init__(self, transposed: bool, bias: bool, skipped: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transposed, self.skipped = transposed, skipped
        sizes = ((5, 8, 12), (5, 6, 8)) if transposed else ((5, 12, 8), (5, 8, 6))
        self.wi, self.wo = (nn.Parameter(torch.randn(*size)) for size in sizes)
        if bias:
            self.bi, self.bo = nn.Parameter(torch.randn(5, 12)), nn.Parameter(torch.randn(5, 8))

    def forward(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        if scores.dtype == torch.int64:
            scores, chosen = chosen, scores
        out = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            rows, which = torch.where(chosen == expert)
            wi, wo = (weight[expert] if self.transposed else weight[expert].t() for weight in (self.wi, self.wo))
            gate, up = (tokens[rows] @ wi + (self.bi[expert] if hasattr(self, "bi") else 0)).chunk(2, -1)
            made = torch.nn.functional.silu(gate) * up @ wo + (self.bo[expert] if hasattr(self, "bo") else 0)
            if expert != self.skipped:
                out.index_add_(0, rows, made * scores[rows, which, None])
        return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_module_that_says_nothing_of_itself(transposed: bool, bias: bool) -> None:
    found = proved_experts(Looping(transposed, bias))
    assert found is not None and found.gating == Gating() and not found.identity
    assert found.layout == ("wi", "wo", ("bi", "bo") if bias else None, transposed, 5)
    assert proved_experts(Looping(transposed, bias, skipped=1)) is None


class Limited(Looping):
    """A gate of at most 7, which tokens of the usual size do not come near."""

    def forward(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert, (wi, wo) in enumerate(zip(self.wi, self.wo, strict=True)):
            gate, up = (tokens @ wi.t()).chunk(2, -1)
            made = torch.nn.functional.silu(gate).clamp(max=7) * up @ wo.t()
            out += made * (scores * (chosen == expert)).sum(-1, keepdim=True)
        return out


def test_a_limit_that_the_usual_rows_do_not_meet_is_seen() -> None:
    module = Limited(False, False)
    module.wi.data.mul_(0.1)
    with torch.no_grad():
        rows = torch.randn(24, 8)
        chosen = torch.randint(0, 5, (24, 1))
        torch.testing.assert_close(module(rows, torch.ones(24, 1), chosen), Looping.forward(module, rows, torch.ones(24, 1), chosen))
    assert proved_experts(module) is None


def test_what_is_not_called_as_experts_are_is_none() -> None:
    module = Looping(False, False)
    module.more = nn.Parameter(torch.zeros(5, 8, 6))
    assert not is_experts(module)
    del module.more
    assert is_experts(module)
    module.forward = lambda tokens, scores: tokens
    assert not is_experts(module)


def test_a_module_of_that_shape_that_takes_something_else_is_left_alone() -> None:
    module = Looping(False, False)

    def picky(tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        assert scores.dim() == 3, "not called as experts are"
        return tokens

    module.forward = picky
    assert is_experts(module) and proved_experts(module) is None


def test_ids_beyond_the_experts_that_stand_for_the_token_itself() -> None:
    model, prompts = build("longcat_flash"), random_prompts((1, 5, 17))
    found = proved_experts(experts_of(model)[0])
    assert found is not None and found.identity and found.layout.experts < len(experts_of(model)[0].gate_up_proj)
    with LLM(model, num_pages=64, max_batch_tokens=16) as llm:
        assert sum(llm.engine.runner.compiled.rewrite.experts.values()) == len(experts_of(model))
        got = llm.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert [completion.token_ids for completion in got] == [greedy(model, prompt, 8) for prompt in prompts]


def test_the_last_layers_experts_run_for_the_wanted_rows_only() -> None:
    model = build("qwen3_moe")
    with LLM(model, num_pages=64) as llm:
        report = llm.engine.runner.compiled.rewrite
        calls = [node for node in report.gm.graph.nodes if node.target is EXPERTS]
        rows = [node.meta["example_value"].shape[0] for node in calls]
    assert len({str(size) for size in rows}) == 2 and str(rows[-1]) != str(rows[0])


def test_for_experts_that_are_ops_already_the_model_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = build("qwen3_moe"), []
    monkeypatch.setattr(as_ops, "calls_of", lambda _model, blocks, _inputs: asked.append(blocks))
    with experts_as_ops(model) as count, as_ops.looping_experts_as_ops(model, lambda _: {}) as put:
        assert count and not put and not asked


@pytest.mark.skipif("inkling2_text" not in CONFIG_MAPPING, reason="transformers before 5.23 has no module with such numbers")
def test_equal_modules_with_other_numbers_inside_are_proved_apart() -> None:
    model = build("inkling2_text")
    *_, last = experts_of(model)
    last.act_fn.up_softcap.softcap = 0.5
    assert kind_of(last) != kind_of(experts_of(model)[0])
    found = proved_experts(last)
    assert found is not None and found.gating == Gating("silu", gate_softcap=4.0, up_softcap=0.5)
