"""The sampler on the device: the tokens of the CPU, and nothing that waits for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn.engine.guides import Guides
from paged_attn.engine.sampler import Sampler
from paged_attn.engine.sampling_params import SamplingParams
from paged_attn.engine.sampling_state import SamplingState
from tests.engine.models import tokenizer
from tests.gpu.test_no_sync import waiting_is_an_error
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
        pytest.importorskip("llguidance", reason="pip install 'paged-attn[structured]'")
    settings = (*FIRM, *DRAWN, *(GUIDED if guided else ()))
    on_cpu, on_gpu, last = states_of(settings), states_of(settings), SamplingState(SamplingParams(temperature=1.0, top_p=0.5))
    cpu, gpu = Sampler(), Sampler()
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
