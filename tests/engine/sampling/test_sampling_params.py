"""SamplingParams: defaults, normalisation, and every refused value."""

import dataclasses
import math

import numpy as np
import pytest

from paged_attn.engine.sampling_params import SamplingParams


def test_defaults_are_greedy():
    params = SamplingParams()
    assert params.is_greedy
    assert dataclasses.astuple(params) == (
        *(128, 0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), None, (), (), False, None, None, 0),
        *((), None, None, None, 1, 0, (), False, True, None, None),
    )


def test_frozen_and_hashable():
    params = SamplingParams(stop=["a"], stop_token_ids=[1])
    assert hash(params) == hash(SamplingParams(stop=("a",), stop_token_ids=(1,)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


def test_values_are_normalised():
    params = SamplingParams(
        temperature=1,
        stop="END",
        stop_token_ids={5, 2},
        top_k=np.int64(4),
        top_p=np.float32(0.5),
        logprobs=0,
        seed=2**64 - 1,
        logit_bias={7: 1, np.int64(3): np.float32(-0.5)},
        json_schema={"type": "object", "properties": {"b": {}, "a": {}}},
    )
    assert params.temperature == 1.0 and type(params.temperature) is float and not params.is_greedy
    assert params.stop == ("END",)
    assert params.stop_token_ids == (2, 5)
    assert type(params.top_k) is int and type(params.top_p) is float
    assert params.logprobs == 0
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert params.logit_bias == ((3, -0.5), (7, 1.0)) and type(params.logit_bias[0][0]) is int
    assert params.guide == ("json_schema", '{"type": "object", "properties": {"b": {}, "a": {}}}')
    assert dataclasses.replace(params, seed=1).logit_bias == params.logit_bias


@pytest.mark.parametrize(
    "edge",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": None, "min_tokens": 10**6},
        {"top_p": 1e-9},
        {"top_p": 1},
        {"min_p": 1.0},
        {"repetition_penalty": 0.1},
        {"seed": 0},
        {"seed": -1},
        {"frequency_penalty": -2},
        {"presence_penalty": 2.0},
        {"logits_processors": [max]},
        {"logit_bias": {}},
        {"logit_bias": {0: -100, 10**9: 100}},
        {"json_schema": {}},
        {"json_schema": '{"type": "object"}'},
        {"regex": ""},
    ],
)
def test_edges_are_allowed(edge):
    SamplingParams(**edge)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-9),
        ("top_k", -2),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("presence_penalty", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("seed", -2),
        ("seed", 2**64),
        ("stop_token_ids", (3, -1)),
        ("stop", ""),
        ("stop", ("a", "")),
        ("logprobs", -2),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 0.5}),
        ("json_schema", "[]"),
        ("json_schema", "{"),
        ("json_schema", {"a": object()}),
    ],
)
def test_values_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"^{name}: got .*allowed: ") as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).count(";") == 2  # what to do comes last


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", True),
        ("frequency_penalty", "1"),
        ("presence_penalty", True),
        ("logits_processors", max),
        ("logits_processors", (3,)),
        ("max_new_tokens", 3.0),
        ("temperature", "1"),
        ("temperature", False),
        ("top_k", 2.5),
        ("top_k", None),
        ("top_p", None),
        ("min_p", "0"),
        ("repetition_penalty", True),
        ("seed", 1.5),
        ("stop_token_ids", 3),
        ("stop_token_ids", "3"),
        ("stop_token_ids", (3.0,)),
        ("stop", b"x"),
        ("stop", (1,)),
        ("ignore_eos", 1),
        ("logprobs", True),
        ("logit_bias", [5]),
        ("logit_bias", {"5": 1}),
        ("logit_bias", {5: "1"}),
        ("json_schema", True),
        ("regex", b"a"),
        ("grammar", 1),
    ],
)
def test_wrong_types(name, value):
    with pytest.raises(TypeError, match=f"^{name}: got .*allowed: "):
        SamplingParams(**{name: value})


def test_there_is_one_way_to_guide_an_answer_and_it_may_end():
    with pytest.raises(ValueError, match=r"^grammar: got one beside regex; allowed: one of json_schema, regex, grammar; leave"):
        SamplingParams(regex="a", grammar="start: /a/")
    with pytest.raises(ValueError, match=r"^ignore_eos: got True beside json_schema; allowed: False; "):
        SamplingParams(json_schema={}, ignore_eos=True)
    assert SamplingParams().guide is None and not SamplingParams().needs_host
    assert SamplingParams(regex="a").needs_host and SamplingParams(logits_processors=(max,)).needs_host
    assert not SamplingParams(logit_bias={1: 1}).needs_host


def test_none_is_what_vllm_calls_a_default() -> None:
    names = ("stop", "stop_token_ids", "bad_words", "logit_bias", "logits_processors", "allowed_token_ids", "truncate_prompt_tokens")
    params = SamplingParams(max_tokens=3, **dict.fromkeys(names))
    assert params == SamplingParams(max_tokens=3) and not params.stated & {"stop", "bad_words"}, "so that a checkpoint's count"
