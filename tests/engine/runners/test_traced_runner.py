"""The captured model: one compile for every size, logits of sampled rows only, and a model that stays as it was."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from paged_attn import LLM, EngineConfig, SamplingParams, UnsupportedError
from paged_attn.attn_ops.batch.batch import BatchRequest
from paged_attn.compiled.options import CompileOptions
from paged_attn.engine.engine import Engine
from paged_attn.engine.runners.traced_runner import TracedRunner
from tests.engine.models import make_engine, make_llm, oracle, random_prompts, tiny
from tests.tiny_models import COMMON, VOCAB, build_short

GREEDY = SamplingParams(max_new_tokens=6)
DIGITS = [3, 1, 4, 1, 5]
DYNAMOS = {"_dynamo_static_input_type"}  # torch.compile's own mark on every parameter that it has seen


class WithoutLogitsToKeep(nn.Module):
    """A causal LM whose forward has no logits_to_keep."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        return logits


class Attention(nn.Module):
    """One layer of plain scaled_dot_product_attention with learned positions; not a Hugging Face model."""

    def __init__(self, causal: bool = True, vocab: int = 20) -> None:
        super().__init__()
        torch.manual_seed(vocab)
        self.causal = causal
        self.embed, self.positions = nn.Embedding(vocab, 16), nn.Embedding(64, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, vocab)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids) + self.positions(position_ids)
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(hidden).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.head(attended.transpose(1, 2).flatten(-2))


class Branching(Attention):
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids, position_ids)
        return logits * 2 if logits.sum().item() > 0 else logits


class Positionless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 20)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embed(input_ids)


def greedy(model: Attention, new: int) -> list[int]:
    ids = list(DIGITS)
    for _ in range(new):
        ids.append(int(model(torch.tensor([ids]), torch.arange(len(ids))[None])[0, -1].argmax()))
    return ids[len(DIGITS) :]


def run_batch(engine: Engine, *requests: BatchRequest) -> Tensor:
    return engine.step_runner.run(engine.step_runner.prepare(requests)).logits


def spy_on_outputs(engine: Engine) -> list[int]:
    """Rows of logits that the graph itself computed, per step."""
    rows: list[int] = []
    compiled = engine.runner.compiled

    def run_paged(*args: Any) -> Any:
        output = compiled.run_paged(*args)
        logits = next(t for t in output if isinstance(t, Tensor) and t.is_floating_point() and t.shape[-1] == VOCAB)
        rows.append(logits.numel() // VOCAB)
        return output

    engine.runner.compiled = types.SimpleNamespace(run_paged=run_paged)  # type: ignore[assignment]
    return rows


def test_only_the_rows_that_are_sampled_from_get_logits() -> None:
    engine = make_engine(max_batch_tokens=16, overlap=False)
    assert engine.runner.takes_logits_rows
    rows = spy_on_outputs(engine)
    for prompt in random_prompts(0, 6, 5, 40):
        engine.add_request(prompt, SamplingParams(max_new_tokens=3))
    sampled = []
    while engine.has_work:
        sampled.append(len(engine.step()))
    assert sampled == [2, 2, 2, 1, 1, 1]
    assert rows == [2] * 6, "the first three steps compute 16 rows; fewer than two there never are, as torch specialises sizes 0 and 1"


def test_logits_are_those_of_the_wanted_rows() -> None:
    engine = make_engine()
    first, second, third = random_prompts(1, 5, 9, 7)
    logits = run_batch(engine, BatchRequest(first, [3, 1], 0, 1), BatchRequest(second, [7, 2, 9], 0, 0), BatchRequest(third, [4, 5], 0, 3))
    assert logits.shape == (4, VOCAB)
    with torch.no_grad():
        expected = [tiny()(torch.tensor([p])).logits[0] for p in (first, third)]
    torch.testing.assert_close(logits, torch.cat([expected[0][-1:], expected[1][-3:]]), atol=1e-5, rtol=1e-5)


def test_a_model_without_logits_to_keep_works_too() -> None:
    llm = LLM(WithoutLogitsToKeep(tiny()), page_size=4, num_pages=40, max_batch_tokens=16)
    assert not llm.engine.runner.takes_logits_rows
    rows = spy_on_outputs(llm.engine)
    prompts = random_prompts(2, 3, 30, 8)
    assert [c.token_ids for c in llm.generate(prompts, GREEDY)] == [oracle(p, 6) for p in prompts]
    assert rows[0] == 16


def test_a_module_that_is_no_hugging_face_model_works() -> None:
    model = Attention()
    (got,) = LLM(model, page_size=2, num_pages=20).generate(DIGITS, GREEDY)
    assert got.token_ids == greedy(model, 6)


def test_one_compile_serves_every_number_of_tokens() -> None:
    frames = torch._dynamo.utils.counters["stats"]
    before = frames["unique_graphs"]
    engine = LLM(build_short("qwen3"), page_size=16, num_pages=64, max_batch_tokens=512).engine
    assert frames["unique_graphs"] == before + 1
    steps: list[int] = []
    run = engine.step_runner.run
    engine.step_runner.run = lambda step: (steps.append(step.batch.num_tokens), run(step))[1]  # type: ignore[method-assign]
    for lengths in ((1,), (2,), (7,), (3, 30), (200, 200, 200)):
        for prompt in random_prompts(len(lengths), *lengths):
            engine.add_request(prompt, SamplingParams(max_new_tokens=2))
        while engine.has_work:
            engine.step()
    assert {1, 2, 7, 33, 512} <= set(steps)
    assert frames["unique_graphs"] == before + 1
    assert len(engine.runner.compiled.specs) == 2


def test_twelve_engines_in_a_row_over_one_model_and_over_several() -> None:
    models = [Attention(vocab=20 + seed % 3) for seed in range(6)]
    llms = [LLM(model, page_size=4, num_pages=20) for model in [models[0]] * 6 + models]
    for llm in [*llms, *reversed(llms)]:  # the earlier ones still work after the later ones were made
        (got,) = llm.generate(DIGITS, GREEDY)
        assert got.token_ids == greedy(llm.engine.runner.model, 6)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_is_left_as_it_was_found(name: str, dtype: torch.dtype) -> None:
    model = build_short(name, dtype=dtype, attention_dropout=0.5).train()
    model.get_submodule("model.layers.1").eval()  # flags differ from module to module
    before = _everything(model)
    llm = LLM(model, page_size=4, num_pages=40)
    prompts = random_prompts(4, 9, 14)
    got = [c.token_ids for c in llm.generate(prompts, GREEDY)]
    llm.close()
    after = _everything(model)
    assert before.keys() == after.keys()
    for key, value in before.items():
        same = torch.equal(value, after[key]) if isinstance(value, Tensor) else value == after[key]
        assert same, f"{key} changed from {value} to {after[key]}"
    if dtype is torch.float32:  # dropout is off in the engine, though the model is training
        assert got == [oracle(p, 6, model.eval()) for p in prompts]


def _everything(model: nn.Module) -> dict[str, Any]:
    """Parameters, flags, hooks, attributes and settings, to compare."""
    state: dict[str, Any] = {"config": model.config.to_dict(), "attention": model.config._attn_implementation}  # type: ignore[operator, union-attr]
    state["generation"] = model.generation_config.to_dict()  # type: ignore[operator, union-attr]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        state[f"tensor {name}"] = tensor.detach().clone()
        state[f"identity {name}"] = (
            id(tensor),
            tensor.data_ptr(),
            tensor.requires_grad,
            tensor.grad is None,
            sorted(vars(tensor).keys() - DYNAMOS),
        )
    for name, module in model.named_modules():
        state[f"training {name}"] = module.training
        state[f"attributes {name}"] = (sorted(vars(module)), id(type(module)), "forward" in vars(module))
        state[f"hooks {name}"] = {key: len(value) for key, value in vars(module).items() if "hooks" in key}
        state[f"config {name}"] = id(getattr(module, "config", None))
    return state


def test_flags_are_restored_when_the_capture_fails() -> None:
    model = Branching().train()
    model.head.eval()
    with pytest.raises(UnsupportedError, match="Branching cannot be captured as one graph"):
        TracedRunner(model, CompileOptions())
    assert model.training and model.qkv.training and not model.head.training


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (build_short("qwen3").to("meta"), r"the model lies on \['meta'\].*one device"),
        (nn.Module(), "the model lies on no device"),
        (Positionless(), "Positionless cannot run paged batches: the model has no attention that paged_attn can see"),
        (Attention(causal=False), "attends in both directions"),
    ],
)
def test_a_model_that_can_not_be_served_is_refused_with_the_reason(model: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        LLM(model, num_pages=10)


def test_weights_changed_in_place_are_used_at_once() -> None:
    model = build_short("qwen3", seed=1)
    llm = LLM(model, config=EngineConfig(page_size=4, num_pages=40, prefix_cache=False))
    prompt = random_prompts(5, 9)[0]
    before = llm.generate(prompt, GREEDY)[0].token_ids
    model.load_state_dict(build_short("qwen3", seed=2).state_dict())
    after = llm.generate(prompt, GREEDY)[0].token_ids
    assert after == oracle(prompt, 6, model) != before


def test_bfloat16_keeps_its_kv_in_bfloat16() -> None:
    model = build_short("qwen3", dtype=torch.bfloat16)
    engine = make_engine(model)
    assert engine.pool.dtype is torch.bfloat16
    prompt = random_prompts(6, 12)[0]
    logits = run_batch(engine, BatchRequest(prompt, [1, 2, 3], 0, 12))
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits.float(), expected.float(), atol=0.1, rtol=0.05)


def test_engines_of_two_models_do_not_mix() -> None:
    llms = [make_llm(), make_llm(tiny("gemma3_text"))]
    prompt = random_prompts(7, 21)[0]
    streams = [llm.stream(prompt, GREEDY) for llm in llms]
    tokens = [[a.token_id, b.token_id] for a, b in zip(*streams, strict=True)]
    assert [list(t) for t in zip(*tokens, strict=True)] == [oracle(prompt, 6), oracle(prompt, 6, tiny("gemma3_text"))]


def test_a_model_loaded_with_eager_attention_is_traced_as_it_is_and_left_eager() -> None:
    model = build_short("qwen3")
    model.set_attn_implementation("eager")
    prompts = [[5, 6, 7], list(range(2, 19))]
    with LLM(model, num_pages=32) as llm:
        assert model.config._attn_implementation == "eager"
        assert {layer.found_by for layer in llm.engine.runner.compiled.rewrite.layers} == {"softmax"}
        got = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=5))]
    assert got == [oracle(p, 5, model) for p in prompts]


def test_a_model_whose_sdpa_would_drop_its_softcap_keeps_it() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma2", **COMMON, attn_logit_softcapping=2.0, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config).eval()
    assert model.config._attn_implementation == "eager"
    prompts = [[5, 6, 7], list(range(2, 19))]
    with LLM(model, num_pages=32) as llm:
        assert [spec.softcap for spec in llm.engine.runner.compiled.specs] == [2.0] * 3
        got = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=5))]
    assert got == [oracle(p, 5, model) for p in prompts]


def test_a_module_with_a_transformers_config_of_its_own_is_refused_for_its_own_reason() -> None:
    """It has no attention implementation to switch."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.embed = AutoConfig.for_model("qwen3", **COMMON), nn.Embedding(VOCAB, 8)

        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            x = self.embed(input_ids) + position_ids[..., None]
            return (x @ x.transpose(1, 2)).softmax(-1) @ x @ self.embed.weight.T

    with pytest.raises(UnsupportedError, match="the model attends in both directions"):
        LLM(Own())
