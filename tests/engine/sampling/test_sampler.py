"""The sampler against transformers' warpers, its distribution, and its independence of the batch."""

import dataclasses
import math
import re
import subprocess
import sys

import pytest
import torch
from transformers.generation import logits_process as hf

from paged_attn.engine.sampling import sample_tokens, sampler
from paged_attn.engine.sampling.sampler import Sampler
from paged_attn.engine.sampling.sampler_output import BAD_LOGITS, NONE_LEFT, SampledToken
from paged_attn.engine.sampling.sampling_state import SamplingState
from paged_attn.engine.sampling_params import SamplingParams
from tests.sample_once import Chooser, NonFiniteLogitsError, sample, sampled

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
    return SamplingState(SamplingParams(**{"temperature": 1.0, "seed": 0, **settings}), seen or [])


def drawn_from(logits: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
    """The scores that tokens are drawn from."""
    found: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_tokens, "sample_from_all", lambda scores, uniform: found.append(scores) or scores.argmax(-1))
        Chooser().choose(logits, dict(enumerate(states)))
    (scores,) = found
    return scores


def allowed_tokens(logits: torch.Tensor, states: list[SamplingState]) -> list[set[int]]:
    """What each row may draw, all of them going through the filters; a filter that one row alone uses must not touch the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SamplingParams, "has_limit", True)
        return [set((row > -INF).nonzero()[:, 0].tolist()) for row in drawn_from(logits, states)]


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
    scores = drawn_from(logits, states)
    for row in range(3):
        assert torch.equal(scores[row : row + 1], hf_scores(logits[row : row + 1], states[row].params, seen[row]))


@pytest.mark.parametrize("settings", SETTINGS)
def test_draws_follow_the_filtered_distribution(settings):
    draws, vocab, seen = 4000, 12, [0, 3]
    row = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    states = [state_of(seen, **{**settings, "seed": seed}) for seed in range(draws // 2)]
    expected = hf_scores(row, states[0].params, seen).softmax(-1)[0].double() * draws
    counts = torch.zeros(vocab)
    for _ in range(2):  # neighbouring seeds, and neighbouring tokens of one
        for token in sample(row.expand(len(states), vocab), states):
            counts[token.token_id] += 1
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum().item()
    freedom = int(kept.sum()) - 1
    assert chi_square <= freedom + 4 * math.sqrt(2 * freedom) + 4


def test_greedy_is_argmax_with_its_tie_break():
    logits = torch.randint(0, 4, (64, 33), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    states = [SamplingState(SamplingParams(seed=row)) for row in range(64)]
    assert [token.token_id for token in sample(logits, states)] == logits.argmax(-1).tolist()
    assert sample(logits, states)[0] == SampledToken(int(logits[0].argmax()), None, None)


def test_greedy_with_penalty_follows_transformers():
    logits = torch.tensor([[2.0, 1.9, -1.0], [2.0, 1.9, -1.0], [-1.0, -1.1, -9.0]])
    states = [state_of([0], temperature=0.0, repetition_penalty=penalty) for penalty in (1.5, 1.0, 1.5)]
    assert [token.token_id for token in sample(logits, states)] == [1, 0, 1]
    states[0].tokens += [1, 1]
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
            states[m].tokens.append(token.token_id)
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
    assert state_of(seed=3).uniform == state_of(seed=3).uniform != state_of(seed=4).uniform
    entropy = [SamplingState(SamplingParams(temperature=1.0)) for _ in range(2)]
    assert entropy[0].uniform != entropy[1].uniform
    assert state_of(seed=2**64 - 1).seed == 2**64 - 1
    replayed = SamplingState(SamplingParams(temperature=1.0, seed=entropy[0].seed))
    assert replayed.uniform == entropy[0].uniform


@pytest.mark.parametrize("along", ["seed", "num_chosen"])
def test_random_numbers_are_uniform_and_do_not_follow_one_another(along):
    states = [state_of(seed=7) for _ in range(20_000)]
    for i, state in enumerate(states):
        setattr(state, along, i)
    numbers = torch.tensor([state.uniform for state in states], dtype=torch.float64)
    assert 0 <= numbers.min() and numbers.max() < 1
    counts = torch.histc(numbers, 50, 0, 1)
    assert ((counts - 400) ** 2 / 400).sum() < 49 + 5 * math.sqrt(2 * 49)
    for lag in (1, 2, 3, 64):
        assert abs(torch.corrcoef(torch.stack([numbers[:-lag], numbers[lag:]]))[0, 1]) < 0.03


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-53])
def test_extreme_uniforms_stay_inside_the_allowed_tokens(uniform, monkeypatch):
    monkeypatch.setattr(SamplingState, "uniform", uniform)
    logits = torch.tensor([[0.0, -INF, 1.0, 200.0, -200.0], [5.0, 4.0, 3.0, -INF, -INF], [0.0, 0.0, 0.0, 0.0, 0.0]])
    states = [state_of(), state_of(top_k=2), state_of(top_p=0.5)]
    for row, (token, allowed) in enumerate(zip(sample(logits, states), allowed_tokens(logits, states), strict=True)):
        assert token.token_id in allowed and logits[row, token.token_id] > -INF


def test_low_temperature_and_huge_logits_do_not_overflow():
    logits = torch.tensor([[3e38, 1.0, -3e38], [1.0, 0.0, -INF]])
    assert [t.token_id for t in sample(logits, [state_of(temperature=1e-6, top_p=0.9) for _ in range(2)])] == [0, 0]


def test_some_token_is_left_where_all_are_far_below_zero():
    """Divided by the temperature they were all -inf, and the token was one past the vocabulary, on which the next step of all failed."""
    logits = torch.tensor([[-3e38, -1e38, -2e38], [-INF, -3e38, -INF], [-1e38, 0.0, -INF]])
    for more in ({}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.5}):
        assert [t.token_id for t in sample(logits, [state_of(temperature=1e-6, **more) for _ in range(3)])] == [1, 1, 1]
    held = [state_of([2, 2], temperature=1e-6, repetition_penalty=1e300, allowed_token_ids=(2,))]
    assert [t.token_id for t in sample(torch.tensor([[5.0, 4.0, -0.5]]), held)] == [2]


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
def test_non_finite_rows_are_named(temperature):
    logits = torch.zeros(6, 8)
    logits[0, :7] = -INF  # legal
    logits[1, 3], logits[2, 3], logits[4] = math.nan, INF, -INF
    logits[5, 0], logits[5, 1] = INF, math.nan
    states = [state_of(temperature=temperature, seed=row) for row in range(6)]
    with pytest.raises(NonFiniteLogitsError, match=r"rows \[1, 2, 4, 5\]") as caught:
        sample(logits, states)
    assert caught.value.rows == (1, 2, 4, 5) and isinstance(caught.value, ValueError)
    assert all(state.num_chosen == 0 for state in states)
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
    with pytest.raises(ValueError, match=r"states: got some for rows \[2\] of 2 rows"):
        Chooser().choose(torch.zeros(2, 9), {0: state, 2: state_of()})
    with pytest.raises(ValueError, match="tokens so far: got id 8; allowed: 0 to 7"):
        state.tokens.append(8)  # what the prompt holds may be of a padded table (test_padded_table.py)
        sample(torch.zeros(1, 8), [state])
    with pytest.raises(ValueError, match="got id -1"):
        sample(torch.zeros(1, 8), [state_of([3, -1], presence_penalty=1.0)])


def test_rows_without_a_state_get_the_most_likely_token():
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(6))
    logits[3, 0] = math.nan
    settings = [{"temperature": 0.0}, {"seed": 3}, {"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 0.0, "logprobs": 2}]
    all_states, some_states = ([state_of(**each) for each in settings] for _ in range(2))
    expected = sampled(Chooser().choose(logits, dict(enumerate(all_states))))
    assert sampled(Chooser().choose(logits, {1: some_states[1], 4: some_states[4]})) == expected
    assert expected[3] is None and [state.num_chosen for state in some_states] == [0, 1, 0, 0, 1]


def test_frequency_and_presence_are_of_the_output_alone():
    logits = torch.tensor([[2.0, 1.9, 1.8, 1.7]])
    state = state_of([0, 0, 0], temperature=0.0, frequency_penalty=0.3, presence_penalty=0.4)
    chosen, chooser = [], Chooser()
    for _ in range(6):
        (token,) = sampled(chooser.choose(logits, {0: state}))
        chosen.append(token.token_id)
        state.tokens.append(token.token_id)
    expected, counts = [], torch.zeros(4)
    for _ in range(6):
        expected.append(int((logits[0] - 0.3 * counts - 0.4 * (counts > 0)).argmax()))
        counts[expected[-1]] += 1
    assert chosen == expected and len(set(expected)) == 4


@pytest.mark.parametrize("known", [True, False])
def test_penalties_know_the_tokens_that_the_host_does_not(known):
    """The host may learn of a token a step later: the counts on the device have it."""
    logits = torch.randn(40, 2, 30, generator=torch.Generator().manual_seed(4))
    states = [state_of([1], seed=s, repetition_penalty=1.9, frequency_penalty=0.5, temperature=t) for s, t in enumerate((0.0, 1.2))]
    chooser, late = Chooser(), []
    for step in logits:
        chosen = chooser.choose(step, dict(enumerate(states)))
        if known:
            late.append(chosen)
        for done in late:
            for state, token in zip(states, sampled(done), strict=True):
                state.tokens.append(token.token_id)
        late = [] if known else [chosen]
    reference = [state_of([1], seed=s, repetition_penalty=1.9, frequency_penalty=0.5, temperature=t) for s, t in enumerate((0.0, 1.2))]
    for step in logits:
        for state, token in zip(reference, sample(step, reference), strict=True):  # counts made anew from the host each time
            state.tokens.append(token.token_id)
    length = len(states[0].tokens)
    assert length >= 40 and [s.tokens for s in states] == [s.tokens[:length] for s in reference]


def test_rows_of_counts_are_cleared_and_more_are_made():
    chooser = Chooser()
    logits = torch.zeros(1, 5)
    logits[0, 3] = 0.1
    for _ in range(30):
        state = state_of([], temperature=0.0, presence_penalty=1.0)
        assert [sampled(chooser.choose(logits, {0: state}))[0].token_id for _ in range(2)] == [3, 0], (
            "the row held another request's counts"
        )
        chooser.forget(state)
    assert len(chooser._counts.counts) == 8
    many = [state_of([], temperature=0.0, presence_penalty=1.0) for _ in range(20)]
    kept = many[:3]
    assert [t.token_id for t in sampled(chooser.choose(logits.expand(3, 5), dict(enumerate(kept))))] == [3] * 3
    assert [t.token_id for t in sampled(chooser.choose(logits.expand(20, 5), dict(enumerate(many))))] == [0] * 3 + [3] * 17


def test_processors_of_transformers_plug_in():
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(2)).repeat(3, 1)
    no_repeat = hf.NoRepeatNGramLogitsProcessor(2)
    best = int(logits[0].argmax())
    tokens = [best, 4, best]
    penalties = {"temperature": 0.0, "repetition_penalty": 1.1}
    states = [
        state_of([4, best, best, 4], logits_processors=(no_repeat,), **penalties),
        state_of(tokens, **penalties),
        state_of(temperature=0.0),
    ]
    states[0].tokens[-1:] = [best, best]
    processed = no_repeat(torch.tensor([states[0].tokens]), hf_scores(logits[:1], states[0].params, states[0].tokens))
    assert processed.argmax() != hf_scores(logits[:1], states[0].params, states[0].tokens).argmax(), "the processor forbids the best one"
    assert [t.token_id for t in sample(logits, states)] == [
        int(processed.argmax()),
        int(hf_scores(logits[:1], states[1].params, tokens).argmax()),
        best,
    ]


def raising(ids, scores):
    return scores[:, [10**6]]


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (lambda ids, scores: scores[0], r"the logits processor .* returned a tensor of shape \(5,\); allowed: scores of shape \(1, 5\)"),
        (lambda ids, scores: None, "returned 'NoneType'"),
        (lambda ids, scores: scores.to_sparse(), "returned a sparse, nested or meta tensor"),
        (lambda ids, scores: scores.to("meta"), "returned a sparse, nested or meta tensor"),
        (raising, "the logits processor <function raising.* raised IndexError: index 1000000 is out of bounds"),
    ],
)
def test_what_a_processor_does_wrong_is_its_requests_error(processor, words):
    processors = (), (processor,), (lambda ids, scores: -scores,)
    states = [state_of(temperature=0.0, logits_processors=each) for each in processors]
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]]).expand(3, -1)
    assert Sampler().choose(logits, dict(enumerate(states))).wait().ids == [4, NONE_LEFT, 0]
    assert re.search(words, str(states[1].error)) and states[2].error is None


def test_a_row_without_a_token_says_whose_fault_that_is():
    states = [state_of(logits_processors=(lambda ids, scores: scores - INF,)), state_of(logits_processors=(lambda ids, scores: scores,))]
    logits = torch.tensor([[0.0] * 5, [math.nan] * 5])
    assert Sampler().choose(logits, dict(enumerate(states))).wait().ids == [NONE_LEFT, BAD_LOGITS]


def test_a_row_draws_alike_whatever_the_others_ask_for():
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(6))
    for settings in SETTINGS:
        alone = [sample(logits, [state_of([2], seed=s, **settings)])[0] for s in range(20)]
        crowd = [state_of([3], **other) for other in SETTINGS]
        together = [sample(logits.expand(len(crowd) + 1, -1), [*crowd, state_of([2], seed=s, **settings)])[-1] for s in range(20)]
        assert alone == together


@pytest.mark.parametrize("edits", [{}, {"logit_bias": {3: 2.0}}, {"repetition_penalty": 1.5}])
def test_tokens_that_kernels_put_in_place_are_those_put_there_one_by_one(edits, monkeypatch):
    """Beside greedy rows, with edits and without, and rows that are not finite."""
    pytest.importorskip("triton")
    from paged_attn.backends.sampling import sample as kernels

    monkeypatch.setattr(sampler, "sample_tokens", kernels.sample_tokens)
    logits = torch.randn(7, 90, generator=torch.Generator().manual_seed(5)).to("cuda" if torch.cuda.is_available() else "cpu")
    logits[4] = torch.nan
    found, calls = [], []
    for in_place in (False, True):
        states = [
            state_of([3, 7], **given)
            for given in (
                {"temperature": 0.9, "seed": 1, **edits}, {"temperature": 0.0}, {"temperature": 1.3, "top_k": 5},
                {"temperature": 0.0, **edits},
                {"temperature": 0.8, "top_p": 0.7, "seed": 3}, {"temperature": 0.8, "top_p": 0.7, "min_p": 0.1, "seed": 4, **edits},
            )
        ]  # fmt: skip
        in_kernel = (lambda *given: not calls.append(kernels.sample_in_place(*given))) if in_place else lambda *given: False
        monkeypatch.setattr(sampler, "sample_in_place", in_kernel)
        chooser, steps = Chooser(), []
        for _ in range(3):
            steps.append(chooser.choose(logits, dict(enumerate(states))).wait().ids)
        found.append(steps)
    assert found[0] == found[1] and len(calls) == 3
    assert {step[4] for step in found[0]} == {BAD_LOGITS} and len({step[0] for step in found[0]}) > 1


def test_imports_without_transformers():
    sampling = "from paged_attn.engine.sampling import sampling_state, token_counts, sample_tokens, sampler_output, sampler"
    others = "from paged_attn.engine import sampling_params; from paged_attn.engine.requests import detokenizer"
    code = f"import sys; {sampling}; {others}; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_biases_are_added_before_penalties_to_their_own_row():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    biases = [{3: 2.0, 7: -100.0}, {}, {0: 1.5, 49: 0.25, 7: -1.0}, {49: -3.0}]
    states = [state_of([3, 7, 49], temperature=t, top_k=k, repetition_penalty=1.7, logit_bias=b, seed=5)
              for b, t, k in zip(biases, (0.0, 1.0, 1.0, 0.7), (0, 0, 9, 0), strict=True)]  # fmt: skip
    added = torch.stack([logits[row].index_add(0, torch.tensor([*b], dtype=torch.int64), torch.tensor([*b.values()]))
                         for row, b in enumerate(biases)])  # fmt: skip
    plain = [state_of([3, 7, 49], temperature=s.params.temperature, top_k=s.params.top_k, repetition_penalty=1.7, seed=5) for s in states]
    kept = logits.clone()
    assert [t.token_id for t in sample(logits, states)] == [t.token_id for t in sample(added, plain)]
    assert torch.equal(logits, kept)


def test_a_greedy_request_takes_the_token_with_the_bias():
    logits = torch.zeros(3, 20)
    states = [state_of(temperature=0.0), state_of(temperature=0.0, logit_bias={11: 0.5}), state_of(temperature=0.0, logit_bias={0: -100})]
    assert [t.token_id for t in sample(logits, states)] == [0, 11, 1]
    with pytest.raises(ValueError, match="logit_bias: got token id 20; allowed: 0 to 19"):
        sample(logits[:1], [state_of(logit_bias={20: 1.0})])
