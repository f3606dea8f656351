"""The sampler against transformers' warpers, its distribution, and its independence of the batch."""

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from transformers.generation import logits_process as hf

from paged_attn.engine import sampler
from paged_attn.engine.sampler import NonFiniteLogitsError, SampledToken, SamplingState, sample
from paged_attn.engine.sampling_params import SamplingParams

INF = math.inf


def hf_scores(row: torch.Tensor, params: SamplingParams, seen: list[int]) -> torch.Tensor:
    """What `generate(do_sample=True)` would apply to one row [1, V]."""
    warpers = [hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)] if params.repetition_penalty != 1 else []
    if params.temperature not in (0.0, 1.0):
        warpers.append(hf.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        warpers.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(hf.MinPLogitsWarper(params.min_p))
    scores = row.float().clone()
    for warper in warpers:
        scores = warper(torch.tensor([seen], dtype=torch.int64), scores)
    return scores


def state_of(seen: list[int] | None = None, **settings) -> SamplingState:
    state = SamplingState(SamplingParams(**{"temperature": 1.0, "seed": 0, **settings}))
    state.observe(seen or [])
    return state


def allowed_tokens(logits: torch.Tensor, states: list[SamplingState]) -> list[set[int]]:
    scores = sampler._penalised_scores(logits, list(range(len(states))), states)
    found = sampler.filter_scores(scores, [state.params for state in states])
    return [set(order[first:].tolist()) for order, first in zip(found.order, found.first[:, 0].tolist(), strict=True)]


SETTINGS = [
    {},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"top_p": 0.999, "temperature": 3.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.6, "top_k": 20},
    {"temperature": 0.3, "top_k": 50, "top_p": 0.8},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("vocab", [3, 50, 517])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "ties", "forbidden"])
def test_same_tokens_survive_as_in_transformers(vocab, kind):
    generator = torch.Generator().manual_seed(vocab)
    for _ in range(3):
        logits = torch.randn(len(SETTINGS), vocab, generator=generator) * 4
        if kind == "bfloat16":
            logits = logits.bfloat16()
        elif kind == "ties":
            logits = logits.round()
        elif kind == "forbidden":
            logits[:, 1::2] = -INF
        seen = torch.randint(vocab, (9,), generator=generator).tolist()
        states = [state_of(seen + seen[:3], **settings) for settings in SETTINGS]
        for row, allowed in enumerate(allowed_tokens(logits, states)):
            params, one = states[row].params, logits[row : row + 1]
            expected = hf_scores(one, params, seen)[0]
            possible = sorted(token for token in allowed if logits[row, token] > -INF)
            if kind in ("float32", "forbidden"):
                assert possible == expected.isfinite().nonzero()[:, 0].tolist(), (kind, SETTINGS[row])
            # torch's unstable sort picks which of the tied tokens top-p drops, so with ties compare their scores
            unfiltered = dataclasses.replace(params, top_k=0, top_p=1.0, min_p=0.0)
            scores = hf_scores(one, unfiltered, seen)[0, possible]
            assert torch.equal(scores.sort().values, expected[expected.isfinite()].sort().values), (kind, SETTINGS[row])


def test_of_tied_tokens_top_p_drops_the_lower_ids():
    assert allowed_tokens(torch.zeros(1, 8), [state_of(top_p=0.3)]) == [{5, 6, 7}]


def test_repetition_penalty_is_bitwise_that_of_transformers():
    logits = torch.randn(3, 101, generator=torch.Generator().manual_seed(1))
    seen = [[1, 5, 5, 100], [], [7]]
    states = [state_of(ids, repetition_penalty=penalty) for ids, penalty in zip(seen, (1.3, 1.3, 0.8), strict=True)]
    scores = sampler._penalised_scores(logits, [0, 1, 2], states)
    for row in range(3):
        assert torch.equal(scores[row : row + 1], hf_scores(logits[row : row + 1], states[row].params, seen[row]))


@pytest.mark.parametrize("settings", SETTINGS)
def test_draws_follow_the_filtered_distribution(settings):
    draws, vocab, seen = 4000, 12, [0, 3]
    row = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    state = state_of(seen, **settings)
    expected = hf_scores(row, state.params, seen).softmax(-1)[0].double() * draws
    counts = torch.zeros(vocab)
    for token in sample(row.expand(draws, vocab), [state] * draws):
        counts[token.token_id] += 1
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum().item()
    freedom = int(kept.sum()) - 1
    assert chi_square <= freedom + 4 * math.sqrt(2 * freedom) + 4


def test_greedy_is_argmax_with_its_tie_break_and_no_generator_moves():
    logits = torch.randint(0, 4, (64, 33), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    states = [SamplingState(SamplingParams(seed=row)) for row in range(64)]
    before = states[5].generator.get_state()
    assert [token.token_id for token in sample(logits, states)] == logits.argmax(-1).tolist()
    assert torch.equal(states[5].generator.get_state(), before)
    assert sample(logits, states)[0] == SampledToken(int(logits[0].argmax()), None, None)


def test_greedy_with_penalty_follows_transformers():
    logits = torch.tensor([[2.0, 1.9, -1.0], [2.0, 1.9, -1.0], [-1.0, -1.1, -9.0]])
    states = [state_of([0], temperature=0.0, repetition_penalty=penalty) for penalty in (1.5, 1.0, 1.5)]
    assert [token.token_id for token in sample(logits, states)] == [1, 0, 1]
    states[0].observe([1, 1])
    assert sample(logits, states)[0].token_id == 0  # both divided once


REQUESTS = [
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0.0},
    {"temperature": 1.5, "top_k": 30, "repetition_penalty": 1.4},
    {"temperature": 2.0, "min_p": 0.02, "logprobs": 1},
    {"temperature": 1.0},
]


def generate(members: list[int], steps: int, companions: int = 0) -> dict[int, list[SampledToken]]:
    """Tokens of some REQUESTS run together; each one's logits depend on its own number and step."""
    states = {m: state_of([m], seed=m, **REQUESTS[m]) for m in members}
    output: dict[int, list[SampledToken]] = {m: [] for m in members}
    for step in range(steps):
        rows = [(torch.randn(301, generator=torch.Generator().manual_seed(1000 * m + step)) * 3).bfloat16() for m in members]
        extra = [torch.randn(301).bfloat16() for _ in range(companions)]
        others = [state_of(seed=None, top_k=1 + i, top_p=0.5, min_p=0.3, logprobs=9) for i in range(companions)]
        tokens = sample(torch.stack(extra + rows), others + list(states.values()))[companions:]
        for m, token in zip(members, tokens, strict=True):
            output[m].append(token)
            states[m].observe([token.token_id])
    return output


def test_tokens_do_not_depend_on_the_batch():
    together = generate([0, 1, 2, 3, 4], 12)
    reordered = generate([4, 2, 0, 3, 1], 12, companions=6)
    for m in range(5):
        alone = generate([m], 12)[m]
        assert alone == together[m] == reordered[m]
    assert len({token.token_id for token in together[0]}) > 3


def test_state_survives_preemption():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(8))
    steady, preempted = state_of(seed=5), state_of(seed=5)
    expected = [sample(logits[i : i + 1], [steady])[0] for i in range(6)]
    other = state_of(seed=9)
    got = [sample(logits[i : i + 1], [preempted])[0] for i in range(3)]
    for _ in range(4):
        sample(logits[:1], [other])  # steps without the preempted request
    assert got + [sample(logits[i : i + 1], [preempted])[0] for i in range(3, 6)] == expected


def test_seeds():
    assert state_of(seed=3).draw() == state_of(seed=3).draw() != state_of(seed=4).draw()
    entropy = [SamplingState(SamplingParams(temperature=1.0)) for _ in range(2)]
    assert entropy[0].draw() != entropy[1].draw()
    assert state_of(seed=2**64 - 1).seed == 2**64 - 1
    replayed = SamplingState(SamplingParams(temperature=1.0, seed=entropy[0].seed))
    assert replayed.draw() == torch.rand((), dtype=torch.float64, generator=torch.Generator().manual_seed(entropy[0].seed))


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-53])
def test_extreme_uniforms_stay_inside_the_allowed_tokens(uniform, monkeypatch):
    monkeypatch.setattr(SamplingState, "draw", lambda self: uniform)
    logits = torch.tensor([[0.0, -INF, 1.0, 200.0, -200.0], [5.0, 4.0, 3.0, -INF, -INF], [0.0, 0.0, 0.0, 0.0, 0.0]])
    states = [state_of(), state_of(top_k=2), state_of(top_p=0.5)]
    for row, (token, allowed) in enumerate(zip(sample(logits, states), allowed_tokens(logits, states), strict=True)):
        assert token.token_id in allowed and logits[row, token.token_id] > -INF


def test_low_temperature_and_huge_logits_do_not_overflow():
    logits = torch.tensor([[3e38, 1.0, -3e38], [1.0, 0.0, -INF]])
    assert [t.token_id for t in sample(logits, [state_of(temperature=1e-6, top_p=0.9) for _ in range(2)])] == [0, 0]


def test_logprobs_are_of_the_raw_logits():
    logits = torch.tensor([[1.0, 3.0, 3.0, -INF, 2.0]]).repeat(3, 1)
    settings = {"repetition_penalty": 2.0, "temperature": 0.5, "top_k": 1}
    states = [state_of([1], logprobs=k, **settings) for k in (0, 2, 99)]
    raw = logits.log_softmax(-1)[0]
    none, two, all_of_them = sample(logits, states)
    assert none.token_id == 2 and none.logprob == raw[2].item() and none.top_logprobs == ()
    assert two.top_logprobs == ((1, raw[1].item()), (2, raw[2].item()))
    assert all_of_them.top_logprobs == tuple((i, raw[i].item()) for i in (1, 2, 4, 0))
    greedy = sample(logits[:1].bfloat16(), [SamplingState(SamplingParams(logprobs=1))])[0]
    assert greedy.top_logprobs == ((greedy.token_id, greedy.logprob),)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_rows_are_named_before_any_generator_moves(temperature):
    logits = torch.zeros(6, 8)
    logits[0, :7] = -INF  # legal
    logits[1, 3], logits[2, 3], logits[4] = math.nan, INF, -INF
    logits[5, 0], logits[5, 1] = INF, math.nan
    states = [state_of(temperature=temperature, seed=row) for row in range(6)]
    with pytest.raises(NonFiniteLogitsError, match=r"rows \[1, 2, 4, 5\]") as caught:
        sample(logits, states)
    assert caught.value.rows == (1, 2, 4, 5) and isinstance(caught.value, ValueError)
    assert all(state.draw() == state_of(seed=row).draw() for row, state in enumerate(states))
    assert sample(logits[:1], states[:1])[0].token_id == 7


def test_logits_are_left_untouched_and_may_come_from_anywhere():
    with torch.inference_mode():
        logits = torch.randn(3, 20)
    copy = logits.clone()
    states = [
        state_of([1], top_p=0.5, repetition_penalty=2.0, logprobs=2),
        state_of(temperature=0.0),
        state_of(min_p=0.5),
    ]
    sample(logits, states)
    assert torch.equal(logits, copy)
    sample(torch.randn(3, 20, dtype=torch.float64, requires_grad=True), states)
    sample(torch.randn(20, 3).t(), states)
    assert sample(torch.empty(0, 20), []) == []


def test_refused_calls():
    state = state_of([8], repetition_penalty=2.0)
    for logits in (torch.zeros(8), torch.zeros(1, 0), torch.zeros(1, 8, dtype=torch.int64)):
        with pytest.raises(ValueError, match="logits: got shape"):
            sample(logits, [state])
    with pytest.raises(ValueError, match="states: got 1 for 2 rows"):
        sample(torch.zeros(2, 9), [state])
    with pytest.raises(ValueError, match="row 0: got id 8"):
        sample(torch.zeros(1, 8), [state])
    with pytest.raises(ValueError, match="token_ids: got -1"):
        state.observe([3, -1])


def test_observe_is_free_without_a_penalty():
    state = state_of([1, 2, -5])
    assert len(state.seen_ids) == 0
    penalised = state_of(range(300), repetition_penalty=1.1)
    for token in range(250, 400):
        penalised.observe([token])
    assert sorted(penalised.seen_ids.tolist()) == list(range(400))


def test_imports_without_transformers():
    names = "sampling_params, sampler, detokenizer"
    code = f"import sys; from paged_attn.engine import {names}; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
