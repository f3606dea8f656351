"""The sampler on the device: the tokens of the CPU, and nothing that waits for it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from paged_attn.engine.sampling.forbidden import BadWords, Forbidden
from paged_attn.engine.sampling.sampling_state import SamplingState
from paged_attn.engine.sampling.structured.guides import Guides
from paged_attn.engine.sampling_params import SamplingParams
from tests.engine.models import tokenizer
from tests.gpu.test_no_sync import waiting_is_an_error
from tests.sample_once import Chooser
from tests.tiny_models import VOCAB

FIRM: tuple[dict[str, Any], ...] = (
    {}, {"logit_bias": {5: 3.0, 40: -100.0}}, {"repetition_penalty": 1.7}, {"frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"logit_bias": {7: 50.0}, "repetition_penalty": 1.2, "logprobs": 3}, {"temperature": 0.7, "top_k": 1},
    {"temperature": 1.0, "top_p": 1e-6},
)  # fmt: skip
DRAWN: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
    {"temperature": 1.3, "min_p": 0.1},
)
GUIDED: tuple[dict[str, Any], ...] = ({"regex": "[a-f]{9}"}, {"regex": "[x-z!]{9}", "temperature": 1.0, "logit_bias": {93: 3.0}})


def states_of(settings: tuple[dict[str, Any], ...]) -> list[SamplingState]:
    guides = Guides(tokenizer(), VOCAB, frozenset())
    params = [SamplingParams(**{"seed": number, **each}) for number, each in enumerate(settings)]
    return [SamplingState(each, [3, 7, 5, 7], guides.guide(each)) for each in params]


@pytest.mark.parametrize("guided", [False, True])
def test_the_tokens_of_the_cpu_without_waiting(guided: bool) -> None:
    if guided:
        pytest.importorskip("llguidance", reason="pip install '.[structured]'")
    settings = (*FIRM, *DRAWN, *(GUIDED if guided else ()))
    on_cpu, on_gpu, last = states_of(settings), states_of(settings), SamplingState(SamplingParams(temperature=1.0, top_p=0.5))
    cpu, gpu = Chooser(), Chooser()
    gpu.choose(torch.randn(2, VOCAB, device="cuda"), {0: last}).wait()  # makes and compiles what is kept
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        logits = torch.randn(len(settings), VOCAB, generator=generator) * 4
        want = cpu.choose(logits, dict(enumerate(on_cpu))).wait()
        there = logits.cuda()
        with waiting_is_an_error():
            chosen = gpu.choose(there, dict(enumerate(on_gpu)))
        got = chosen.wait()
        assert got.ids == want.ids
        for states in (on_cpu, on_gpu):
            for state, token in zip(states, got.ids, strict=True):
                state.tokens.append(token)
                if state.guide is not None:
                    assert state.guide.goes_on_after(token) and state.guide.error is None


DRAWS: tuple[dict[str, Any], ...] = ({}, {"min_p": 0.05}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 2000, "top_p": 0.7, "min_p": 0.01})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [5, 4097, 128256])
def test_draws_of_the_kernels_and_of_the_cpu(dtype: torch.dtype, vocabulary: int) -> None:
    """Their exponentials differ in the last place, so that one draw in many thousands may fall to the next token."""
    logits = (torch.randn(200, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 3).to(dtype)
    settings = [{"temperature": 0.8 + 0.1 * (row % 3), "seed": row, **DRAWS[row % len(DRAWS)]} for row in range(len(logits))]
    of_cpu, of_gpu = (dict(enumerate(SamplingState(SamplingParams(**each)) for each in settings)) for _ in range(2))
    want, got = Chooser().choose(logits, of_cpu).wait().ids, Chooser().choose(logits.cuda(), of_gpu).wait().ids
    assert sum(a == b for a, b in zip(want, got, strict=True)) >= 198


def test_a_draw_on_the_device_is_the_same_in_every_batch() -> None:
    logits = (torch.randn(60, 50257, generator=torch.Generator().manual_seed(3)) * 2).bfloat16().cuda()
    settings = [{"temperature": 1.0, "seed": row, **DRAWS[row % len(DRAWS)]} for row in range(len(logits))]
    states = [SamplingState(SamplingParams(**each)) for each in settings]
    together = Chooser().choose(logits, dict(enumerate(states))).wait().ids
    for row, each in enumerate(settings):
        alone = Chooser().choose(logits[row : row + 1], {0: SamplingState(SamplingParams(**each))}).wait().ids
        assert alone == [together[row]], each
        penalised = SamplingState(SamplingParams(**each, logit_bias={0: 0.0}))  # drawn from scores of its own in float32
        assert Chooser().choose(logits, {row: penalised}).wait().ids[row] == together[row]


def test_bad_words_and_least_tokens_do_not_wait_for_the_token_under_way() -> None:
    words = [[3, 4], [3, 5], [8, 3, 6], [9], *([token, 7] for token in range(0, VOCAB, 2))]
    forbidden = Forbidden([1, 2], 5, BadWords(words))
    on_cpu, on_gpu = (SamplingState(SamplingParams(), [3, 7], None, forbidden) for _ in range(2))
    cpu, gpu, generator, before = Chooser(), Chooser(), torch.Generator().manual_seed(1), None
    for step in range(12):
        logits = torch.randn(1, VOCAB, generator=generator) * 4
        want = cpu.choose(logits, {0: on_cpu}).wait().ids
        there = logits.cuda()
        with waiting_is_an_error() if step else nullcontext():
            chosen = gpu.choose(there, {0: on_gpu})
        assert chosen.wait().ids == want
        on_cpu.tokens += want
        on_gpu.tokens += before or []  # one step late
        before = want
