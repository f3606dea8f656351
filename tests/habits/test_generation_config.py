"""A checkpoint's generation_config says what a request does not state; what is stated wins; a GenerationConfig is taken as it is meant."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import GenerationConfig

import paged_attn
from paged_attn import LLM, SamplingParams
from paged_attn.cli.commands.demo import embedded_model
from paged_attn.cli.main import build_parser
from paged_attn.cli.options import sampling_params
from paged_attn.engine.generation_config import default_params
from tests.engine.models import make_llm, oracle, tiny
from tests.server.serving import chat_tokenizer, serving

PROMPT = [4, 5, 6]
LLAMA3 = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [90, 91]}  # as published


@contextmanager
def llm_of(config: dict[str, Any], **settings: Any) -> Iterator[LLM]:
    """An LLM made of the tiny model while that has this generation_config."""
    with mock.patch.object(tiny(), "generation_config", GenerationConfig(**config)):
        llm = make_llm(tiny(), chat_tokenizer(), **settings)
    with llm:
        yield llm


def new_tokens(llm: LLM, params: Any = None) -> list[int]:
    return llm.generate([PROMPT], params)[0].token_ids


def test_what_a_request_does_not_state_is_the_checkpoints() -> None:
    with llm_of({**LLAMA3, "max_new_tokens": 5, "repetition_penalty": 1.2}) as llm:
        defaults = llm.default_params
        assert (defaults.temperature, defaults.top_p, defaults.max_new_tokens, defaults.repetition_penalty) == (0.6, 0.9, 5, 1.2)
        whole = SamplingParams(max_new_tokens=5, temperature=0.6, top_p=0.9, repetition_penalty=1.2, seed=3)
        assert new_tokens(llm, SamplingParams(seed=3)) == new_tokens(llm, whole)
        assert new_tokens(llm, SamplingParams(seed=3)) != new_tokens(llm, SamplingParams(seed=3, temperature=0.0))
        assert len({tuple(new_tokens(llm)) for _ in range(6)}) > 1, "no params at all: it samples"


def test_what_a_request_states_wins_even_where_it_is_our_default() -> None:
    with llm_of({**LLAMA3, "max_new_tokens": 5, "repetition_penalty": 1.2}) as llm:
        assert new_tokens(llm, SamplingParams(temperature=0.0, repetition_penalty=1.0, max_new_tokens=7)) == oracle(PROMPT, 7)


def test_ours_takes_nothing_but_the_end_tokens() -> None:
    end = oracle(PROMPT, 12)[4]
    with llm_of({**LLAMA3, "eos_token_id": end}, generation_config="ours") as llm:
        assert llm.default_params == SamplingParams() and not llm.default_params.stated
        assert new_tokens(llm, SamplingParams(max_new_tokens=12)) == oracle(PROMPT, 12)[: oracle(PROMPT, 12).index(end) + 1]


def test_without_do_sample_it_is_greedy_as_in_generate() -> None:
    with llm_of({"temperature": 0.6, "top_k": 5, "repetition_penalty": 1.3}) as llm:
        assert llm.default_params.is_greedy and llm.default_params.stated == {"repetition_penalty"}
        assert new_tokens(llm, SamplingParams(max_new_tokens=12)) == oracle(PROMPT, 12, repetition_penalty=1.3)


def test_the_demo_model_is_greedy() -> None:
    folder = embedded_model()
    assert folder is not None
    assert default_params(type("Model", (), {"generation_config": GenerationConfig.from_pretrained(folder)})).stated == frozenset()


def test_an_environment_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_ATTN_GENERATION_CONFIG", "ours")
    assert paged_attn.EngineConfig.from_environment().generation_config == "ours"
    with pytest.raises(ValueError, match="generation_config is 'vllm'; allowed are 'auto' and 'ours'"):
        paged_attn.EngineConfig(generation_config="vllm")


def test_what_is_asked_for_and_not_served_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with llm_of({"no_repeat_ngram_size": 3, "num_beams": 1}) as llm:
        assert llm.default_params.stated == frozenset()
    assert "the model's generation_config asks for no_repeat_ngram_size=3, which is not served" in caplog.text
    with pytest.raises(ValueError, match=r"the model's generation_config: top_p: got 3.0; .*; generation_config='ours' takes nothing"):
        default_params(type("Model", (), {"generation_config": type("C", (), {"do_sample": True, "top_p": 3.0})}))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_generation_config_in_place_of_params(overlap: bool) -> None:
    end = oracle(PROMPT, 12)[5]
    with llm_of({}, overlap=overlap) as llm:
        assert new_tokens(llm, GenerationConfig(max_new_tokens=7)) == oracle(PROMPT, 7)
        config = GenerationConfig(max_new_tokens=12, eos_token_id=end, repetition_penalty=1.2, suppress_tokens=[oracle(PROMPT, 1)[0]])
        assert new_tokens(llm, config) == tiny().generate(torch.tensor([PROMPT]), generation_config=config)[0, 3:].tolist()
        both = llm.generate([PROMPT, PROMPT], [GenerationConfig(max_new_tokens=3), SamplingParams(max_new_tokens=2)])
        assert [c.token_ids for c in both] == [oracle(PROMPT, 3), oracle(PROMPT, 2)]
        drawn = GenerationConfig(max_new_tokens=4, do_sample=True, top_k=3, num_return_sequences=2)
        assert [c.answer for c in llm.generate([PROMPT], drawn)] == [0, 1]
        with pytest.raises(ValueError, match=r"asks for num_beams=4, which is not served; .*docs/generate.md"):
            new_tokens(llm, GenerationConfig(num_beams=4))
        with pytest.raises(ValueError, match="has max_length=20, which counts the prompt, too; give max_new_tokens"):
            new_tokens(llm, GenerationConfig(max_length=20))
        with pytest.raises(TypeError, match="allowed are SamplingParams, or a GenerationConfig"):
            new_tokens(llm, {"temperature": 1})


def test_an_end_token_is_no_bad_word_as_in_generate() -> None:
    end, words = oracle(PROMPT, 12)[4], [[oracle(PROMPT, 12)[4]], [oracle(PROMPT, 12)[1], 7]]
    config = GenerationConfig(max_new_tokens=12, eos_token_id=[end], bad_words_ids=words)
    expected = tiny().generate(torch.tensor([PROMPT]), generation_config=config)[0, 3:].tolist()
    assert expected[-1] == end and len(expected) < 12
    with llm_of({"eos_token_id": end, "bad_words_ids": words}) as llm:
        assert new_tokens(llm, SamplingParams(max_new_tokens=12)) == expected
    with llm_of({"eos_token_id": end}) as llm:
        assert new_tokens(llm, GenerationConfig(max_new_tokens=12, bad_words_ids=words)) == expected
        assert end not in new_tokens(llm, SamplingParams(max_new_tokens=12, bad_words=words)), "what a request asks for itself it gets"
    with llm_of({}) as llm:
        assert new_tokens(llm, config) == expected


def test_a_generation_config_that_does_not_say_samples_where_the_model_does() -> None:
    with llm_of(LLAMA3) as llm:
        drawn = [new_tokens(llm, GenerationConfig(max_new_tokens=8)) for _ in range(6)]
        assert len(set(map(tuple, drawn))) > 1
        assert new_tokens(llm, GenerationConfig(max_new_tokens=8, do_sample=False)) == oracle(PROMPT, 8)


def test_over_http_too() -> None:
    with llm_of({"do_sample": True, "temperature": 0.001, "max_new_tokens": 5}) as llm, serving(lambda: llm.engine) as running:
        body = {"prompt": PROMPT, "max_tokens": 8, "return_token_ids": True}

        def answer(route: str, **fields: Any) -> dict[str, Any]:
            return dict(running.http.post(f"/v1/{route}", json=fields).raise_for_status().json())

        assert answer("completions", **body)["choices"][0]["token_ids"] == oracle(PROMPT, 8), "as cold as greedy, and not at OpenAI's 1"
        warm = [answer("completions", **body, temperature=1.0, seed=seed)["choices"][0]["token_ids"] for seed in range(4)]
        assert any(ids != oracle(PROMPT, 8) for ids in warm)
        messages = [{"role": "user", "content": "Hi"}]
        assert answer("chat/completions", messages=messages)["usage"]["completion_tokens"] == 5
        assert answer("chat/completions", messages=messages, max_tokens=7)["usage"]["completion_tokens"] == 7


def test_the_command_states_what_was_given_and_no_more() -> None:
    parser = build_parser()
    assert sampling_params(parser.parse_args(["generate", "--model", "m"])).stated == frozenset()
    assert sampling_params(parser.parse_args(["generate", "--model", "m", "--top-k", "0"])).stated == {"top_k"}
    checked = sampling_params(parser.parse_args(["generate", "--model", "m", "--check"]))
    assert checked.stated == {"temperature"} and checked.is_greedy
    assert sampling_params(parser.parse_args(["demo"])).max_new_tokens == 120


def test_params_that_are_copied_state_the_same() -> None:
    params = SamplingParams(max_new_tokens=3, seed=1)
    for other in (copy.copy(params), copy.deepcopy(params), params.with_seed(2)):
        assert other.stated == {"max_new_tokens", "seed"}
    assert SamplingParams(3).stated == {"max_new_tokens"}
