"""What people type who come from transformers, vLLM or SGLang: it works as the one meaning that it has here, or says what does."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn import LLM, EngineConfig, SamplingParams
from paged_attn.engine import setting_names
from tests.engine.models import oracle, tiny
from tests.server.serving import chat_tokenizer

NEW = 4


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny(), tokenizer=chat_tokenizer(), num_pages=64)


def tokens(completions: Any) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def test_vllms_call(llm: LLM) -> None:
    params = SamplingParams(max_tokens=NEW, top_k=-1)
    assert params.max_new_tokens == NEW and params.top_k == 0
    assert tokens(llm.generate([[4, 5, 6]], sampling_params=params)) == [oracle([4, 5, 6], NEW)]
    assert [event.token_id for event in llm.stream([4, 5, 6], sampling_params=params)] == oracle([4, 5, 6], NEW)
    with pytest.raises(TypeError, match="params and sampling_params are the same"):
        llm.generate([[4]], params, sampling_params=params)


@pytest.mark.parametrize(
    "prompts",
    [
        {"prompt_token_ids": [4, 5, 6]},
        [{"prompt_token_ids": [4, 5, 6]}],
        {"prompt_token_ids": [4, 5, 6], "prompt": "other"},
        {"input_ids": [4, 5, 6]},
        {"input_ids": torch.tensor([[9, 9, 4, 5, 6]]), "attention_mask": torch.tensor([[0, 0, 1, 1, 1]])},
        {"input_ids": [[4, 5, 6, 0]], "attention_mask": [[1, 1, 1, 0]]},
    ],
)
def test_prompts_as_others_take_them(llm: LLM, prompts: Any) -> None:
    assert tokens(llm.generate(prompts, SamplingParams(max_tokens=NEW))) == [oracle([4, 5, 6], NEW)]


def test_what_a_tokenizer_returns(llm: LLM) -> None:
    assert llm.tokenizer is not None
    texts = ["Hi", "Hello there"]
    one_by_one = tokens(llm.generate(texts, SamplingParams(max_tokens=NEW)))
    assert tokens(llm.generate(llm.tokenizer(texts), SamplingParams(max_tokens=NEW))) == one_by_one
    assert tokens(llm.generate([{"prompt": text} for text in texts], SamplingParams(max_tokens=NEW))) == one_by_one


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"multi_modal_data": {"image": object()}},
            "a prompt is a mapping with 'multi_modal_data', which is not served; allowed are 'prompt'",
        ),
        ({"pixel_values": torch.zeros(1, 3)}, "with 'pixel_values', which is not served"),
        ({"token_type_ids": [[0, 0, 1]]}, r"token_type_ids are not all 0, .* LLM.score\(text_1, text_2\)"),
        ({"token_type_ids": torch.tensor([[0, 0, 1]])}, "token_type_ids are not all 0"),
    ],
)
def test_nothing_of_a_mapping_is_dropped(llm: LLM, more: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        llm.generate({"input_ids": [[4, 5, 6]], **more})
    harmless = {"token_type_ids": [[0, 0, 0]], "multi_modal_data": None, "length": [3]}
    assert tokens(llm.generate({"input_ids": [[4, 5, 6]], **harmless}, SamplingParams(max_tokens=NEW))) == [oracle([4, 5, 6], NEW)]


def test_a_conversation_is_no_prompt(llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"give the conversation to LLM\.chat"):
        llm.generate([{"role": "user", "content": "Hi"}])


def test_a_mapping_of_something_else_is_refused(llm: LLM) -> None:
    with pytest.raises(TypeError, match="a prompt is a mapping of 'text'; allowed are 'prompt', 'prompt_token_ids' or 'input_ids'"):
        llm.generate([{"text": "Hi"}])
    with pytest.raises(TypeError, match="a prompt is a mapping of 'prompt'; allowed are"):
        llm.generate({"prompt": None})


@pytest.mark.parametrize(("theirs", "ours"), setting_names.SAME_SETTING.items())
def test_a_setting_by_another_engines_name(theirs: str, ours: str) -> None:
    value: Any = {"prefix_cache": False, "backend": "reference", "state_dtype": "bfloat16"}.get(ours, 8)
    for made in (
        EngineConfig(**{theirs: value}),
        EngineConfig.from_environment(**{theirs: value}),
        EngineConfig().with_(**{theirs: value}),
    ):
        assert getattr(made, ours) == value
    with pytest.raises(ValueError, match=f"{theirs} is {ours} here, and both are given; leave {theirs} out"):
        EngineConfig(**{theirs: value, ours: value})


@pytest.mark.parametrize("name", setting_names.OTHER_SETTING)
def test_a_setting_that_is_something_else_here_says_what(name: str) -> None:
    with pytest.raises(ValueError, match="unknown engine setting") as raised:
        LLM(tiny(), **{name: 1})
    assert setting_names.OTHER_SETTING[name] in str(raised.value)


@pytest.mark.parametrize("name", setting_names.OTHER_CALL)
def test_a_keyword_of_another_engines_generate(llm: LLM, name: str) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(TypeError, match=re.escape(setting_names.OTHER_CALL[name])):
            call([4, 5, 6], **{name: None})


def test_answers_lie_where_vllm_has_them(llm: LLM) -> None:
    found = llm.generate([4, 5, 6], SamplingParams(max_tokens=3, n=2, temperature=1.0))
    assert [each.outputs[0].token_ids for each in found] == tokens(found)
    assert [each.outputs[0].num_cached_tokens for each in found] == [each.cached_tokens for each in found]
    assert found[0].cumulative_logprob is None
    (scored,) = llm.generate([4, 5, 6], SamplingParams(max_tokens=3, logprobs=1))
    assert scored.cumulative_logprob == pytest.approx(
        sum(each[token] for each, token in zip(scored.logprobs, scored.token_ids, strict=True))
    )


@pytest.mark.parametrize("name", setting_names.OTHER_PARAM)
def test_a_parameter_that_is_something_else_here_says_what(name: str) -> None:
    with pytest.raises(TypeError, match=f"SamplingParams has no '{name}'") as raised:
        SamplingParams(**{name: 1})
    assert setting_names.OTHER_PARAM[name] in str(raised.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("temprature", r"did you mean temperature\?"),
        ("max_new_token", r"did you mean max_new_tokens\?"),
        ("best_off", "as best_of: nothing is thrown away here"),
    ],
)
def test_a_name_that_nobody_knows_gets_the_nearest(wrong: str, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        SamplingParams(**{wrong: 1})


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"temperature": 0}, "it is a request's: SamplingParams(temperature=...)"),
        ({"max_tokens": 5}, "it is a request's: SamplingParams(max_tokens=...)"),
        ({"prompt": "x"}, "did you mean prompts?"),
        ({"namespaces": 1}, "did you mean namespace?"),
        ({"use_beam_search": True}, setting_names.OTHER_PARAM["use_beam_search"]),
    ],
)
def test_a_keyword_that_a_call_does_not_know_says_where_it_goes(llm: LLM, given: dict[str, Any], hint: str) -> None:
    calls = {"generate": llm.generate, "stream": llm.stream, "chat": llm.chat, "stream_chat": llm.stream_chat}
    for name, call in calls.items():
        if "prompt" in given and "chat" in name:
            continue
        with pytest.raises(TypeError, match=f"LLM.{name} has no '{next(iter(given))}'") as raised:
            call([[4]], **given)
        assert f"({hint})" in str(raised.value)


def test_a_far_name_of_another_engine_is_no_hint() -> None:
    for given, words in (
        ({"torch_dtype": "float32"}, "dtype, as in dtype='float32'"),
        ({"quux": 1}, "unknown engine setting 'quux'; known"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            LLM(tiny(), **given)  # type: ignore[arg-type]


def test_public_names_are_completed() -> None:
    assert {"LLM", "SamplingParams", "forward_context"} <= set(dir(paged_attn))


def test_a_keyword_of_llm_itself_is_suggested_too() -> None:
    with pytest.raises(ValueError, match=r"unknown engine setting 'tokeniser' \(did you mean tokenizer\?\)"):
        LLM(tiny(), tokeniser=None)
    with pytest.raises(ValueError, match=r"'temperature' \(it is a request's: SamplingParams\(temperature=...\)\)"):
        LLM(tiny(), temperature=0)
    with pytest.raises(AttributeError, match=r"no attribute 'SamplingParam' \(did you mean SamplingParams\?\)"):
        getattr(paged_attn, "SamplingParam")  # noqa: B009


def test_every_name_of_the_tables_is_one_of_ours() -> None:
    assert set(setting_names.SAME_SETTING.values()) <= set(EngineConfig.__dataclass_fields__)
    assert set(setting_names.SAME_PARAM.values()) <= set(SamplingParams.__dataclass_fields__)
    assert not set(setting_names.OTHER_SETTING) & set(EngineConfig.__dataclass_fields__)
    assert not set(setting_names.OTHER_PARAM) & set(SamplingParams.__dataclass_fields__)
