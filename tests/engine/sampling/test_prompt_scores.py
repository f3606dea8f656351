"""Prompt log-probabilities are those of the unmodified model, whatever else is in the batch, and no step computes logits without bound."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paged_attn import LLM, EngineConfig, SamplingParams
from paged_attn.engine.requests.outputs import Completion
from paged_attn.engine.sampling import sampler_output
from paged_attn.engine.sampling.sampler_output import LOGITS_BYTES, PromptScores, ScoredTokens, score_rows
from paged_attn.engine.steps.step_runner import StepOutput
from tests.covering import every_pair
from tests.engine.models import (
    POISON,
    assert_idle,
    assert_nothing_left,
    fail_once,
    make_engine,
    make_llm,
    oracle,
    poisoned,
    random_prompts,
    run_all,
    run_past_errors,
    tiny,
)  # fmt: skip
from tests.engine.steps.test_captured_steps import captured_engine, modes_of
from tests.engine.test_recurrent import poison_freed_slots
from tests.recurrent_models import recurrent
from tests.tiny_models import VOCAB, build

TOLERANCE = 1e-5
PROMPTS = random_prompts(3, 1, 2, 5, 8, 9, 33, 12, 16)
WANTED = [(0, 0), (0, 1), (4, 2), (0, 3), (3, 1), (0, 1), (6, None), (5, None)]  # new tokens and log-probabilities of each prompt
PARAMS = [SamplingParams(max_new_tokens=new, prompt_logprobs=k) for new, k in WANTED]


def own_scores(model: Any, prompt: list[int]) -> list[list[float]]:
    """Log-probabilities [T - 1, V] by the unmodified model, this prompt alone."""
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1).tolist()


def assert_scored(model: Any, completion: Completion, count: int) -> None:
    prompt, scores = completion.prompt_token_ids, completion.prompt_logprobs
    assert scores is not None and scores[0] is None and len(scores) == len(prompt)
    for token, row, got in zip(prompt[1:], own_scores(model, prompt), scores[1:], strict=True):
        best = sorted(range(len(row)), key=lambda i: -row[i])[:count]
        assert got is not None and set(got) == {token, *best}
        assert all(abs(value - row[i]) < TOLERANCE for i, value in got.items())


def assert_all(model: Any, completions: list[Completion]) -> None:
    for completion, params in zip(completions, PARAMS, strict=True):
        new = params.max_new_tokens
        assert completion.token_ids == (oracle(completion.prompt_token_ids, new, model) if new else [])
        assert completion.finish_reason == "length"
        if params.prompt_logprobs is None:
            assert completion.prompt_logprobs is None
        else:
            assert_scored(model, completion, params.prompt_logprobs)
            assert completion.cached_tokens == 0


@pytest.mark.parametrize(
    ("name", "page_size", "overlap"), every_pair(["qwen3", "llama", "gemma3_text", "gpt2", "mixtral"], [1, 16], [False, True])
)
def test_ragged_batches_in_chunks_beside_ordinary_requests_cold_and_warm(name: str, page_size: int, overlap: bool) -> None:
    model = tiny(name)
    llm = make_llm(model, page_size=page_size, max_batch_tokens=7, overlap=overlap)
    llm.engine.pool.storage.fill_(float("nan"))
    for _ in range(2):
        assert_all(model, llm.generate(PROMPTS, PARAMS))
    assert_nothing_left(llm)


@pytest.mark.parametrize(("name", "more"), [("llama", {}), ("gemma3_text", {"final_logit_softcapping": 3.0})])
def test_through_the_hook(name: str, more: dict[str, Any]) -> None:
    model = build(name, tie_word_embeddings=False, **more)
    llm = LLM(model, config=EngineConfig(page_size=4, num_pages=128, max_batch_tokens=16, compile=False))
    for _ in range(2):
        assert_all(model, llm.generate(PROMPTS, PARAMS))
    assert_nothing_left(llm)


@pytest.mark.parametrize("name", ["mamba", "bamba", "qwen3_next"])
def test_recurrent_models(name: str) -> None:
    model = recurrent(name)
    llm = make_llm(model, max_batch_tokens=16)
    poison_freed_slots(llm.engine)
    prompts = random_prompts(6, 5, 33, 18)
    for _ in range(2):
        for completion in llm.generate(prompts, SamplingParams(max_new_tokens=0, prompt_logprobs=1)):
            assert_scored(model, completion, 1)
    assert_idle(llm.engine)


@pytest.mark.parametrize("compiled", [True, False])
def test_captured_steps(compiled: bool) -> None:
    """As many logits as a graph has, and more, for which steps run uncaptured."""
    model = build("qwen3", tie_word_embeddings=False)
    engine = captured_engine(model, compile=compiled)
    modes = modes_of(engine)
    requests = [engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    run_all(engine)
    assert_all(model, [request.completion() for request in requests])
    assert {"uncaptured", "piecewise", "full"} <= set(modes)


def test_at_the_edges_of_pages() -> None:
    llm = make_llm(page_size=4)
    for size in (3, 4, 5, 8, 9):
        completion = llm.generate([random_prompts(size, size)[0]], SamplingParams(max_new_tokens=0, prompt_logprobs=1))[0]
        assert_scored(tiny(), completion, 1)
    assert_nothing_left(llm)


def test_nothing_is_taken_from_the_prefix_cache_and_others_find_what_it_computed() -> None:
    llm = make_llm(page_size=4)
    prompt = random_prompts(9, 25)[0]
    for _ in range(2):
        scored = llm.generate([prompt], SamplingParams(max_new_tokens=0, prompt_logprobs=0))[0]
        assert scored.cached_tokens == 0
        assert_scored(tiny(), scored, 0)
    ordinary = llm.generate([prompt], SamplingParams(max_new_tokens=3))[0]
    assert (ordinary.cached_tokens, ordinary.token_ids) == (24, oracle(prompt, 3))
    assert_nothing_left(llm)


def test_equal_prompts_do_not_wait_for_each_other() -> None:
    """An ordinary request waits for the one that computes its prefix; a scored one could take nothing from it."""
    llm = make_llm(prefix_wait_tokens=4, max_batch_tokens=128)
    prompt = random_prompts(9, 40)[0]
    params = [SamplingParams(max_new_tokens=new, prompt_logprobs=k) for new, k in ((3, None), (0, 1), (2, 1), (3, None))]
    completions = llm.generate([prompt] * 4, params)
    assert llm.engine.scheduler.stats.held_back == 1
    for completion, each in zip(completions, params, strict=True):
        assert completion.token_ids == oracle(prompt, 3)[: each.max_new_tokens]
        if each.prompt_logprobs is not None:
            assert_scored(tiny(), completion, 1)


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_in_the_middle_of_a_prompt(overlap: bool) -> None:
    engine = make_engine(num_pages=14, max_batch_tokens=8, overlap=overlap)
    long, others = random_prompts(1, 40)[0], random_prompts(2, 5, 8)
    scored = engine.add_request(long, SamplingParams(max_new_tokens=6, prompt_logprobs=2), priority=1)
    while len(scored.scored) < 12:
        engine.step()
    urgent = [engine.add_request(p, SamplingParams(max_new_tokens=12)) for p in others]
    run_all(engine)
    assert engine.scheduler.stats.preemptions > 0
    assert_scored(tiny(), scored.completion(), 2)
    assert scored.output_token_ids == oracle(long, 6) and [r.output_token_ids for r in urgent] == [oracle(p, 12) for p in others]
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at_call", [1, 2, 3, 5])
def test_a_step_that_raises_scores_nothing_twice(at_call: int, overlap: bool) -> None:
    engine = make_engine(max_batch_tokens=8, overlap=overlap)
    fail_once(engine, RuntimeError("out of memory"), at_call)
    requests = [engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    _, raised = run_past_errors(engine)
    assert raised == 1
    assert_all(tiny(), [request.completion() for request in requests])
    assert_idle(engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_cancelled_in_the_middle_it_tells_what_it_knows(steps: int) -> None:
    engine = make_engine(max_batch_tokens=8)
    request = engine.add_request(PROMPTS[5], SamplingParams(max_new_tokens=0, prompt_logprobs=0))
    for _ in range(steps):
        engine.step()
    engine.cancel(request.id)
    assert request.finish_reason == "cancelled" and len(request.scored) <= 8 * steps
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("new", [0, 3])
def test_logits_that_are_not_finite_end_their_request_alone(new: int, overlap: bool) -> None:
    engine = make_engine(max_batch_tokens=8, overlap=overlap)
    with poisoned():
        good, bad = (engine.add_request(p, SamplingParams(max_new_tokens=new, prompt_logprobs=1)) for p in (PROMPTS[5], [5, 6, POISON, 7]))
        run_all(engine)
    assert bad.finish_reason == "error" and "NaN or infinite logits" in str(bad.error)
    assert_scored(tiny(), good.completion(), 1)
    assert_idle(engine)


def test_several_prompts_with_seeds_draw_what_they_draw_without_scores() -> None:
    llm, prompts = make_llm(), PROMPTS[3:6] * 2
    with_scores, without = (
        [c.token_ids for c in llm.generate(prompts, [SamplingParams(8, 0.9, seed=i, logprobs=1, prompt_logprobs=k) for i in range(6)])]
        for k in (2, None)
    )
    assert with_scores == without


def test_the_longest_prompt_and_one_more_token() -> None:
    """Nothing follows from the last token of a prompt that is only scored, so that it needs no position."""
    model = build("llama", max_position_embeddings=32)
    llm = LLM(model, page_size=4, num_pages=32)
    longest = random_prompts(8, 33)[0]
    completion = llm.generate([longest], SamplingParams(max_new_tokens=0, prompt_logprobs=1))[0]
    assert_scored(model, completion, 1)
    for params in (SamplingParams(max_new_tokens=1, prompt_logprobs=1), SamplingParams(max_new_tokens=0)):
        with pytest.raises(ValueError, match="33 tokens > 32, the model's positions; shorten it by 1"):
            llm.generate([longest], params)
    with pytest.raises(ValueError, match="34 tokens > 32, the model's positions; shorten it by 1"):
        llm.generate([[*longest, 5]], SamplingParams(max_new_tokens=0, prompt_logprobs=1))


def test_the_pool_needs_room_for_all_but_the_last_token() -> None:
    llm = make_llm(page_size=4, num_pages=4)
    prompt = random_prompts(8, 13)[0]
    assert_scored(tiny(), llm.generate([prompt], SamplingParams(max_new_tokens=0, prompt_logprobs=0))[0], 0)
    with pytest.raises(ValueError, match="can never fit"):
        llm.generate([prompt], SamplingParams(max_new_tokens=1, prompt_logprobs=0))


@pytest.mark.parametrize("vocab", [257, 32_000, 128_256, 262_144, 1 << 30])
def test_logits_of_a_step_stay_within_the_budget(vocab: int) -> None:
    rows = score_rows(vocab)
    assert rows >= 16 and (rows == 16 or 4 * rows * vocab <= LOGITS_BYTES)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_prompt_never_has_all_its_logits_at_once(monkeypatch: pytest.MonkeyPatch, compiled: bool, overlap: bool) -> None:
    """With the budget of a vocabulary of a million: 64 rows of logits a step, however many tokens it may compute."""
    monkeypatch.setattr(sampler_output, "LOGITS_BYTES", 64 * 4 * VOCAB)
    monkeypatch.setattr(sampler_output, "BLOCK_BYTES", 8 * 4 * VOCAB)
    model = build("llama", tie_word_embeddings=False, max_position_embeddings=512)
    llm = LLM(model, config=EngineConfig(page_size=16, num_pages=64, overlap=overlap, compile=compiled))
    run, shapes, blocks = llm.engine.step_runner.run, [], []
    softmax = torch.Tensor.log_softmax

    def spied(step: Any) -> StepOutput:
        output = run(step)
        shapes.append(tuple(output.logits.shape))
        return output

    def spied_softmax(self: torch.Tensor, *args: Any) -> torch.Tensor:
        blocks.append(tuple(self.shape))
        return softmax(self, *args)

    llm.engine.step_runner.run = spied  # type: ignore[method-assign]
    monkeypatch.setattr(torch.Tensor, "log_softmax", spied_softmax)
    prompts = random_prompts(1, 400, 90, 20, 70)
    params = [SamplingParams(max_new_tokens=0, prompt_logprobs=1)] * 3 + [SamplingParams(max_new_tokens=4)]
    completions = llm.generate(prompts, params)
    monkeypatch.undo()
    for completion in completions[:3]:
        assert_scored(model, completion, 1)
    assert completions[3].token_ids == oracle(prompts[3], 4, model)
    assert max(rows for rows, _ in shapes) <= 64 + 1 and len(shapes) >= 8
    assert max(rows for rows, _ in blocks) == 8


def test_a_large_vocabulary_is_scored_in_blocks_and_a_token_of_no_probability_is_no_error() -> None:
    vocab = 1 << 21
    logits = torch.zeros(5, vocab, dtype=torch.bfloat16)
    logits[0, 7] = float("-inf")
    logits[3, 1] = float("nan")
    logits[4] = float("-inf")
    parts = [ScoredTokens(0, [7, 9, 3], 1), ScoredTokens(3, [5], 0), ScoredTokens(4, [5], 2)]
    first, nan, nothing = PromptScores(logits, parts).wait()
    assert nan is None and nothing is None and first is not None
    assert [token.token_id for token in first] == [7, 9, 3]
    assert first[0].logprob == -math.inf and first[1].logprob == pytest.approx(-math.log(vocab), abs=1e-4)
    assert [token.top_logprobs[0][0] for token in first if token.top_logprobs] == [0, 0, 0], "the lower id first among equals"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("start", [0, 1, 2, 17, 24, 32, 33, 40])
def test_from_a_token_on(start: int, overlap: bool) -> None:
    """What lies before it comes from the prefix cache."""
    llm = make_llm(page_size=4, max_batch_tokens=16, overlap=overlap)
    prompt = PROMPTS[5]
    llm.generate([prompt[:24]], SamplingParams(max_new_tokens=1))
    for new in (0, 2):
        params = SamplingParams(max_new_tokens=new, prompt_logprobs=1, prompt_logprobs_start=start)
        completion = llm.generate([prompt], params)[0]
        assert completion.token_ids == (oracle(prompt, new) if new else []) and completion.prompt_logprobs is not None
        assert len(completion.prompt_logprobs) == len(prompt) and completion.prompt_logprobs[: max(start, 1)] == [None] * min(
            start or 1, 33
        )
        whole = llm.generate([prompt], SamplingParams(max_new_tokens=0, prompt_logprobs=1))[0].prompt_logprobs
        assert whole is not None
        for got, expected in zip(completion.prompt_logprobs[start:], whole[start:], strict=True):
            assert got == (None if expected is None else pytest.approx(expected, abs=TOLERANCE))
        if new == 0 and start < len(prompt):
            assert completion.cached_tokens == min(max(start - 1, 0) // 4 * 4, 24)


def test_continuations_of_one_context_compute_it_once() -> None:
    """As the choices of a question: those that arrive together wait for the first, and get logits for their own tokens only."""
    llm, (context, *choices) = make_llm(prefix_wait_tokens=8), random_prompts(5, 40, 3, 5, 4, 2)
    params = SamplingParams(max_new_tokens=0, prompt_logprobs=0, prompt_logprobs_start=len(context))
    completions = llm.generate([context + choice for choice in choices], params)
    assert [c.cached_tokens for c in completions] == [0, 36, 36, 36] and llm.engine.scheduler.stats.held_back == 3
    assert llm.engine.stats.cached_tokens == 108 and llm.engine.stats.prompt_tokens == sum(39 + len(c) for c in choices) - 108
    for completion, choice in zip(completions, choices, strict=True):
        own, scores = own_scores(tiny(), context + choice), completion.prompt_logprobs
        assert scores is not None and scores[: len(context)] == [None] * len(context)
        expected = [own[len(context) + i - 1][token] for i, token in enumerate(choice)]
        assert [row[token] for token, row in zip(choice, scores[len(context) :], strict=True) if row] == pytest.approx(
            expected, abs=TOLERANCE
        )
    assert_nothing_left(llm)
