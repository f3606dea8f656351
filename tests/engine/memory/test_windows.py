"""Engines of models with windows and chunks: the unmodified model's tokens, while what was given back is NaN; and how many requests fit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from paged_attn import SamplingParams, explain
from paged_attn.asynchronous.snapshot import EngineSnapshot
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.engine.engine import Engine
from paged_attn.engine.memory.grouped_kv import GroupedKVManager
from paged_attn.engine.memory.kv_manager import KVManager
from paged_attn.engine.sampling.sampler_output import SamplerOutput
from paged_attn.engine.steps.in_flight import InFlightStep
from paged_attn.engine.steps.step_runner import StepRunner
from paged_attn.server.logs.metrics import ServerMetrics
from tests.engine.models import make_engine, make_llm, oracle, random_prompts, run_all, run_past_errors, tiny
from tests.engine.steps.test_captured_steps import captured_engine, modes_of
from tests.tiny_models import build
from tests.zoo.build import build as zoo_model

NEW = 20
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True, temperature=0)
PROMPTS = random_prompts(11, 41, 9, 30, 1, 55, 16, 23, 8)
SIX: dict[str, Any] = {"num_hidden_layers": 6, "sliding_window_pattern": 3}


@functools.cache
def windowed(name: str) -> PreTrainedModel:
    if name == "gpt_oss":
        return zoo_model(name, sliding_window=8)
    return build(name, tie_word_embeddings=False, **(SIX if name == "gemma3_text" else {}))


def poison(engine: Engine) -> list[int]:
    """Every frame is NaN until it is written to, page 0, too, and again when it is given back; how many were, at each time."""
    kv = engine.kv
    assert isinstance(kv, GroupedKVManager)
    give_back, frames, counts = kv.allocator.give_back, engine.pool.storage.view(engine.pool.num_pages, -1), list[int]()

    def poisoning(pages: Any, groups: Any) -> None:
        gone = kv.frames[list(groups)][:, list(pages)].ravel()
        give_back(pages, groups)
        frames[torch.from_numpy(gone[gone > 0]).long()] = float("nan")
        counts.append(int((gone > 0).sum()))

    kv.allocator.give_back = poisoning  # type: ignore[method-assign]
    frames.fill_(float("nan"))
    return counts


def tokens_of(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    requests = [engine.add_request(prompt, PARAMS) for prompt in prompts]
    run_all(engine)
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "llama4_text", "mistral"])
def test_tokens_are_the_models_own_under_a_tight_pool(name: str, overlap: bool) -> None:
    """Ragged prompts in chunks, mixed with decodes, preempted, and twice; and one of them from the prefix cache."""
    model = windowed(name)
    num_pages = {"gemma3_text": 13, "gpt_oss": 15, "llama4_text": 13, "mistral": 9}[name]
    engine = make_engine(model, num_pages=num_pages, max_batch_tokens=12, max_requests=8, overlap=overlap)
    given_back = poison(engine)
    for _ in range(2):
        assert tokens_of(engine, PROMPTS) == [oracle(prompt, NEW, model) for prompt in PROMPTS]
    assert sum(given_back) and (engine.scheduler.stats.preemptions or name == "mistral"), "windows alone do not grow"
    before = engine.stats.cached_tokens
    for _ in range(2):
        assert tokens_of(engine, PROMPTS[:1]) == [oracle(PROMPTS[0], NEW, model)]
    assert engine.stats.cached_tokens >= before + 40


@pytest.mark.parametrize("compiled", [True, False])
def test_graphs_read_static_tables_of_every_group(compiled: bool) -> None:
    model = windowed("gemma3_text")
    engine = captured_engine(model, num_pages=24, max_requests=4, compile=compiled)
    poison(engine)
    engine.pool.storage[: engine.pool.page_elements].zero_()
    assert engine.step_runner.buffers is not None and len(engine.step_runner.buffers.page_tables) == 3
    for table in engine.step_runner.buffers.page_tables:
        table.fill_(engine.pool.num_pages - 1)
    modes = modes_of(engine)
    for _ in range(2):
        assert tokens_of(engine, PROMPTS) == [oracle(prompt, NEW, model) for prompt in PROMPTS]
    assert set(modes) == {"full", "piecewise"}
    engine.close()


def test_samples_of_one_prompt_share_its_pages() -> None:
    model = windowed("gemma3_text")
    llm = make_llm(model, num_pages=30, max_requests=6, prefix_wait_tokens=8)
    poison(llm.engine)
    params = SamplingParams(n=4, max_new_tokens=NEW, temperature=0, ignore_eos=True)
    completions = llm.generate([PROMPTS[0]], params)
    assert [c.token_ids for c in completions] == [oracle(PROMPTS[0], NEW, model)] * 4
    assert [c.cached_tokens for c in completions] == [0, 40, 40, 40]


def test_a_prefix_is_found_where_every_group_has_what_it_needs() -> None:
    """Prompts that leave a cached one in its middle: found at once while there is room; when windows were given back, it is computed once
    more, and then found again."""
    model = windowed("gemma3_text")
    engine = make_engine(model, num_pages=64, prefix_wait_tokens=0)
    stem, *tails = random_prompts(4, 48, 24, 24, 24, 24)

    def cached(prompt: list[int]) -> int:
        before = engine.stats.cached_tokens
        assert tokens_of(engine, [prompt]) == [oracle(prompt, NEW, model)]
        return engine.stats.cached_tokens - before

    kv = engine.kv
    assert isinstance(kv, GroupedKVManager)
    poison(engine)
    assert [cached(stem + tail) for tail in tails[:2]] == [0, 48]
    assert kv.tree is not None
    kv.tree.clear()
    assert cached(stem + tails[0]) == 0
    kv.free_unneeded()
    assert kv.cached_tokens(engine_request := _request(engine, stem + tails[1])) == 0 and not engine_request.num_pages
    assert [cached(stem + tail) for tail in tails[1:3]] == [0, 48]
    kv.free_unneeded()
    assert cached(stem + tails[3]) == 48, "the place where prompts part is kept"
    end = (len(stem + tails[0]) + NEW - 1) // 4 * 4
    longer = stem + tails[0] + oracle(stem + tails[0], NEW, model) + [5, 6, 7]
    assert cached(longer) == end, "and so is the end of an answer"


def _request(engine: Engine, prompt: list[int]) -> Any:
    request = engine.add_request(prompt, PARAMS)
    engine.scheduler.waiting.remove(request)
    del engine.requests[request.id]
    return request


def test_a_step_that_is_taken_back_does_not_miss_what_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting fails while two steps are under way, and their windows have moved on: who lacks pages then is recomputed."""
    model = windowed("mistral")
    engine = make_engine(model, num_pages=64, overlap=True, prefix_cache=False)
    requests = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    for _ in range(12):
        engine.step()
    wait, failed = SamplerOutput.wait, []

    def failing(self: SamplerOutput) -> Any:
        if not failed:
            failed.append(engine.scheduler.stats.preemptions)
            engine.kv.free_unneeded(to_start=False)  # type: ignore[attr-defined]
            raise RuntimeError("the device is gone")
        return wait(self)

    monkeypatch.setattr(SamplerOutput, "wait", failing)
    _, raised = run_past_errors(engine)
    assert raised == 1 and engine.scheduler.stats.preemptions > failed[0]
    assert [request.output_token_ids for request in requests] == [oracle(prompt, NEW, model) for prompt in PROMPTS]


def test_a_first_step_that_is_taken_back_leaves_no_page_without_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt that begins with a cached prefix: the step after it has given back what the lost one was to fill."""
    model = windowed("gemma3_text")
    (prompt,) = random_prompts(11, 68)
    engine = make_engine(model, num_pages=16, max_batch_tokens=24, max_requests=2, overlap=True)
    engine.add_request(prompt[:17], SamplingParams(max_new_tokens=1, ignore_eos=True, temperature=0))
    run_all(engine)
    request = engine.add_request(prompt, PARAMS)
    wait, failed = InFlightStep.wait, []

    def failing(self: InFlightStep) -> None:
        if not failed:
            failed.append(self)
            raise RuntimeError("the device is gone")
        wait(self)

    monkeypatch.setattr(InFlightStep, "wait", failing)
    _, raised = run_past_errors(engine)
    assert raised == 1 and request.cached_tokens == 16 and request.output_token_ids == oracle(prompt, NEW, model)


@pytest.mark.parametrize(("name", "settings"), [("qwen3", {}), ("gemma3_text", {"layer_groups": False}), ("deepseek_v3", {})])
def test_who_gains_nothing_runs_as_before(name: str, settings: dict[str, Any]) -> None:
    engine = make_engine(tiny(name), **settings)
    assert type(engine.kv) is KVManager and engine.kv.frames is None and engine.pool.parts == ()
    assert isinstance(engine.step_runner, StepRunner) and (engine.step_runner.buffers is None or engine.step_runner.buffers.num_groups == 1)
    assert not hasattr(engine.selection.backend, "children")


def test_windows_that_no_request_outgrows_gain_nothing() -> None:
    engine = make_engine(build("mistral", sliding_window=64, max_position_embeddings=64))
    assert type(engine.kv) is KVManager


def test_longer_requests_fit_and_one_that_never_can_is_refused() -> None:
    model = windowed("gemma3_text")
    engine = make_engine(model, num_pages=12, max_batch_tokens=8)
    assert isinstance(engine.kv, GroupedKVManager) and engine.kv.num_usable == 11
    assert engine.kv.max_request_pages == 35 - 2 * 5, "five pages hold a window of 8 and a step of 8, wherever they begin"
    prompt = random_prompts(1, 85)[0]
    with pytest.raises(UnsupportedError, match=r"can never fit: 85 prompt .* 26 pages of 4.*has room for 25 pages"):
        engine.add_request(prompt, SamplingParams(max_new_tokens=19))
    poison(engine)
    prompt = prompt[:81]
    assert tokens_of(engine, [prompt]) == [oracle(prompt, NEW, model)]


def test_explain_and_metrics_tell_what_groups_take() -> None:
    engine = make_engine(windowed("gemma3_text"), num_pages=40)
    tokens_of(engine, PROMPTS[:1])
    kept = 15  # pages of 60 tokens, all cached
    engine.kv.free_unneeded()  # type: ignore[attr-defined]
    frame = engine.pool.page_elements * 4
    now = EngineSnapshot.of(engine)
    assert engine.pool.parts and now.pages_of["all tokens"] == (kept, kept * frame)
    windows, nbytes = now.pages_of["window 8"]
    assert 0 < windows < 2 * kept and nbytes == windows * frame and now.pages_used == 0
    assert now.pages_cached == kept, "those with holes, too"
    assert now.pages_free == (engine.kv.allocator.num_frames - 1 - kept - windows) // 3 < now.pages_total  # type: ignore[attr-defined]
    text = ServerMetrics(lambda: now, lambda: True, 5).text().decode()
    assert f'paged_attn_kv_group_pages{{keeps="window 8"}} {float(windows)}' in text
    lines = explain(engine)
    assert f"layers 2, 5 keep all tokens: {kept} pages" in lines and f"layers 0-1 | 3-4 keep window 8: {windows} pages" in lines
    assert "a request of 256 tokens takes" in lines
