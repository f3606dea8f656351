"""The runner of eager breaks: the model's own tokens without a trace, and a model that is given back as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import import_utils

from paged_attn import LLM, KVPool, SamplingParams, UnsupportedError
from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.backends.selection.select import select_for_pool
from paged_attn.capture.graphs.segments import record
from paged_attn.compiled.options import CompileOptions
from paged_attn.engine.runners.hooked_runner import HookedRunner
from tests.capture.tape import TapeRecorder
from tests.engine.models import oracle, random_prompts
from tests.recurrent_models import recurrent
from tests.tiny_models import COMMON, LONG_ROPE, VOCAB, build
from tests.zoo.oracle import loop

OPTIONS = CompileOptions()
GREEDY = SamplingParams(max_new_tokens=6)


@contextmanager
def runner_of(model: nn.Module, **settings: Any) -> Iterator[HookedRunner]:
    runner = HookedRunner(model, OPTIONS, **settings)
    try:
        yield runner
    finally:
        runner.close()


def pool_of(runner: HookedRunner, pages: int = 32) -> KVPool:
    pool = KVPool(runner.layers, pages, 4, runner.dtype)
    pool.storage.fill_(float("nan"))
    return pool


def context(runner: HookedRunner, batch: Batch, pool: KVPool | None = None) -> ForwardContext:
    pool = pool or pool_of(runner)
    return ForwardContext(batch, pool, select_for_pool("auto", pool).backend)


def batch_of(*requests: BatchRequest) -> Batch:
    return Batch.build(requests, 4)


def tensors_of(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.input_ids, batch.positions, batch.logits_rows


def three_requests() -> tuple[list[list[int]], Batch]:
    """The first wants its last row, the second none, the third its last three."""
    prompts = random_prompts(1, 5, 9, 7)
    pages, logits = ([3, 1], [7, 2, 9], [4, 5]), (1, 0, 3)
    return prompts, batch_of(*(BatchRequest(p, pages, 0, n) for p, pages, n in zip(prompts, pages, logits, strict=True)))


def serve(model: nn.Module, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    with LLM(model, page_size=4, num_pages=128, compile=False, **settings) as llm:
        assert isinstance(llm.engine.runner, HookedRunner)
        return [c.token_ids for c in llm.generate(prompts, GREEDY)]


def tensors_in(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def state_of(model: nn.Module) -> dict[str, Any]:
    """Tensors, flags, attributes, hooks and settings, to compare."""
    config = getattr(model, "config", None)
    state: dict[str, Any] = {"config": config.to_dict(), "attention": config._attn_implementation} if config is not None else {}
    for name, tensor in tensors_in(model):
        state[name] = (id(tensor), tensor.data_ptr(), tensor._version, tensor.requires_grad)
    for name, module in model.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if "hooks" in key}
        state[f"module {name}"] = (module.training, sorted(vars(module)), hooks, id(getattr(module, "config", None)))
    return state


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "gpt2", "mixtral", "deepseek_v3"])
def test_greedy_tokens_are_the_models_own(name: str) -> None:
    """In chunks, ragged and decoding together, with shared prefixes and windows."""
    model = build(name, tie_word_embeddings=False)
    prompts = random_prompts(2, 3, 30, 8, 17)
    prompts.append(prompts[1] + prompts[0])
    assert serve(model, prompts, max_batch_tokens=16, max_requests=3) == [oracle(p, 6, model) for p in prompts]


def test_logits_are_those_of_the_wanted_rows_in_their_order() -> None:
    model = build("llama")
    (first, _, third), batch = three_requests()
    expected = torch.cat([model(torch.tensor([first])).logits[0, -1:], model(torch.tensor([third])).logits[0, -3:]])
    with runner_of(model) as runner:
        assert runner.takes_logits_rows
        with context(runner, batch):
            logits = runner.forward(*tensors_of(batch))
            assert not logits.requires_grad
            backwards = runner.forward(batch.input_ids, batch.positions, batch.logits_rows.flip(0))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(backwards, expected.flip(0), atol=1e-5, rtol=1e-5)


def _drops_it(model: Any) -> Any:
    def forward(input_ids: Tensor, position_ids: Tensor, use_cache: bool = False) -> Any:
        return type(model).forward(model, input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

    return forward


def _ignores_it(model: Any) -> Any:
    def forward(input_ids: Tensor, position_ids: Tensor, use_cache: bool = False, logits_to_keep: Any = 0) -> Any:
        return type(model).forward(model, input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

    return forward


def _takes_numbers(model: Any) -> Any:
    def forward(input_ids: Tensor, position_ids: Tensor, use_cache: bool = False, logits_to_keep: Any = 0) -> Any:
        kept = 0 if isinstance(logits_to_keep, int) else int(logits_to_keep)
        return type(model).forward(model, input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, logits_to_keep=kept)

    return forward


def _takes_first_rows(model: Any) -> Any:
    def forward(input_ids: Tensor, position_ids: Tensor, use_cache: bool = False, logits_to_keep: Any = 0) -> Any:
        kept = logits_to_keep if isinstance(logits_to_keep, int) else torch.arange(len(logits_to_keep))
        return type(model).forward(model, input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, logits_to_keep=kept)

    return forward


@pytest.mark.parametrize("forward", [_drops_it, _ignores_it, _takes_numbers, _takes_first_rows])
def test_where_the_model_can_not_keep_chosen_rows_they_are_picked(forward: Any) -> None:
    model = build("llama")
    (first, _, third), batch = three_requests()
    expected = torch.cat([model(torch.tensor([first])).logits[0, -1:], model(torch.tensor([third])).logits[0, -3:]])
    model.forward = forward(model)
    with runner_of(model) as runner:
        assert not runner.takes_logits_rows
        with context(runner, batch):
            logits = runner.forward(batch.input_ids, batch.positions, batch.logits_rows.flip(0))
    torch.testing.assert_close(logits.flip(0), expected, atol=1e-5, rtol=1e-5)


def test_a_full_device_does_not_show_what_the_model_takes() -> None:
    model = build("llama")

    def forward(input_ids: Tensor, position_ids: Tensor, use_cache: bool = False, logits_to_keep: Any = 0) -> Any:
        if isinstance(logits_to_keep, Tensor):
            raise torch.OutOfMemoryError("no room")
        return type(model).forward(model, input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

    model.forward = forward
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        HookedRunner(model, OPTIONS)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_moe", "gpt2"])
def test_a_recording_breaks_at_each_layer_and_replays_other_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing between the breaks may wait for the device."""
    with runner_of(build(name)) as runner:
        prompts = random_prompts(6, 5, 9, 6, 8)
        batches = [
            batch_of(BatchRequest(one, [3, 1], 0, 1), BatchRequest(other, [7, 2, 9], 0, 2)) for one, other in (prompts[:2], prompts[2:])
        ]
        call = tuple(t.clone() for t in tensors_of(batches[0]))
        with context(runner, batches[0]), monkeypatch.context() as patches:
            # With a graph being captured transformers reads no value.
            patches.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
            recorded = record(lambda: runner.forward(*call), TapeRecorder(), lambda op: op is UNIFIED_ATTENTION, runner.owned.values())
        assert (recorded.num_calls, recorded.num_graphs) == (3, 4)
        for batch in reversed(batches):
            with context(runner, batch):
                expected = runner.forward(*tensors_of(batch))
            for fixed, new in zip(call, tensors_of(batch), strict=True):
                fixed.copy_(new)
            with context(runner, batch):
                recorded.replay()
            torch.testing.assert_close(recorded.output, expected, atol=1e-6, rtol=1e-6)


def test_others_call_the_model_while_it_is_served() -> None:
    model, ids = build("gemma3_text"), torch.tensor([[5, 6, 7, 8]])
    before, prompts = model(ids).logits, random_prompts(3, 21)
    expected = oracle(prompts[0], 6, model)
    with runner_of(model) as runner:
        _, batch = three_requests()
        with context(runner, batch):
            runner.forward(*tensors_of(batch))
        assert torch.equal(model(ids).logits, before)
        given = torch.tensor(prompts)
        assert model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=6, do_sample=False)[0, 21:].tolist() == expected


def test_calls_that_would_compute_something_else_are_refused() -> None:
    model = build("llama")
    runner = HookedRunner(model, OPTIONS)
    _, batch = three_requests()
    call = tensors_of(batch)
    with pytest.raises(ContextError, match="outside any forward context"):
        runner.forward(*call)
    with context(runner, batch, KVPool(runner.layers[:2], 32, 4, torch.float32)), pytest.raises(ContextError, match="2 attention layers"):
        runner.forward(*call)
    with context(runner, batch), pytest.raises(ContextError, match="4 rows"):
        runner.forward(*(t[:4] for t in call))
    model.set_attn_implementation("sdpa")
    with context(runner, batch), pytest.raises(ContextError, match="was set to another one while an engine serves it"):
        runner.forward(*call)
    runner.close()
    with context(runner, batch), pytest.raises(ContextError, match="was closed"):
        runner.forward(*call)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_the_model_is_left_as_it_was_found(name: str) -> None:
    """Dropout is off while it serves, though the model is training."""
    model = build(name, attention_dropout=0.5).train()
    model.get_submodule("model.layers.1").eval()
    model.model.layers[0].mlp.register_forward_hook(lambda module, _, out: nn.functional.dropout(out, 0.5, module.training))
    before, prompts = state_of(model), random_prompts(4, 9, 14)
    got = serve(model, prompts)
    assert state_of(model) == before
    assert got == [oracle(p, 6, model.eval()) for p in prompts]


def test_a_model_whose_frequencies_follow_the_length_is_left_as_it_was_found() -> None:
    model = build("phi3", **LONG_ROPE)
    prompts = random_prompts(5, 62, 90)  # the border is at 64
    for length in (80, 2):  # whose first calls leave attributes
        model(torch.full((1, length), 3))
    before, values = state_of(model), {name: tensor.clone() for name, tensor in tensors_in(model)}
    got = serve(model, prompts)
    after = state_of(model)
    assert all(before[key] == after[key] for key in before if key in ("config", "attention") or key.startswith("module "))
    assert all(torch.equal(tensor, values[name]) for name, tensor in tensors_in(model))
    assert got == [loop(model, prompt, 6) for prompt in prompts]


def test_closing_gives_the_model_back_and_so_does_dropping_the_runner() -> None:
    model = build("llama")
    runner = HookedRunner(model, OPTIONS)
    with pytest.raises(ContextError, match="patched already"):
        HookedRunner(model, OPTIONS)
    assert model.config._attn_implementation == "paged_attn"
    runner.close()
    runner.close()
    assert model.config._attn_implementation == "sdpa"
    dropped = HookedRunner(model, OPTIONS)
    runner.close()
    assert model.config._attn_implementation == "paged_attn", "an old runner's close is not a new one's"
    del dropped
    gc.collect()
    assert model.config._attn_implementation == "sdpa"


class Both(nn.Module):
    """Not a Hugging Face model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)


def _acausal() -> PreTrainedModel:
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    model.model.config.is_causal = False
    return model


def _roberta() -> PreTrainedModel:
    torch.manual_seed(0)
    values = {k: v for k, v in COMMON.items() if k not in ("num_key_value_heads", "head_dim")}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("roberta", **values, is_decoder=True)).eval()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build("llama4_text"), "self-check failed"),
        (lambda: build("falcon"), "AttentionInterface"),
        (Both, "they need one of its models, and Both is not one"),
        (lambda: build("llama").to("meta"), r"the model lies on \['meta'\]"),
        (_acausal, "attends in both directions"),
        (_roberta, "called without position_ids gives other logits"),
        (lambda: recurrent("falcon_h1"), "an engine with eager breaks has no place for the state"),
    ],
)
def test_a_refused_model_is_left_as_it_was(make: Any, message: str) -> None:
    model = make()
    before, values = state_of(model), {name: tensor.clone() for name, tensor in tensors_in(model)}
    with pytest.raises(UnsupportedError, match=message):
        HookedRunner(model, OPTIONS)
    after = state_of(model)
    assert before.keys() == after.keys()
    assert all(before[key] == after[key] for key in before if key in ("config", "attention") or key.startswith("module "))
    assert all(tensor.is_meta or torch.equal(tensor, values[name]) for name, tensor in tensors_in(model))


def test_a_limit_below_the_switch_lets_a_long_rope_model_in() -> None:
    prompts = random_prompts(5, 20, 3)
    model = build("phi3", **LONG_ROPE, max_position_embeddings=64)
    assert serve(model, prompts) == [oracle(p, 6, model) for p in prompts]


def test_follow_generate_takes_position_ids_from_zero() -> None:
    with runner_of(_roberta(), follow_generate=True) as runner:
        assert len(runner.layers) == 3


def test_options_that_ask_for_compiled_pieces_are_an_error() -> None:
    with pytest.raises(ValueError, match="inductor=True asks for compiled pieces"):
        HookedRunner(build("llama"), CompileOptions(inductor=True))


def test_owned_are_the_tensors_of_this_moment_by_name() -> None:
    model = build("llama", tie_word_embeddings=True)
    with runner_of(model) as runner:
        owned = runner.owned
        assert owned.keys() >= set(model.state_dict())
        assert owned["lm_head.weight"] is owned["model.embed_tokens.weight"]
        replaced = model.model.norm.weight = nn.Parameter(torch.ones(32))
        assert runner.owned["model.norm.weight"] is replaced is not owned["model.norm.weight"]
        assert (runner.max_positions, runner.max_rows, runner.recurrent) == (256, None, ())
