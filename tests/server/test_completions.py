"""POST /v1/completions with OpenAI's own client: the tokens of LLM.generate, in every form."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from paged_attn import SamplingParams
from paged_attn.engine.requests.outputs import Completion
from tests.engine.models import make_engine, make_llm, oracle, random_prompts, tiny, tokenizer
from tests.server.serving import MODEL, Running, chat_tokenizer, serving

TEXT = "It was a dark night"


def complete(running: Running, prompt: Any, **settings: Any) -> Any:
    extra = {"return_token_ids": True, **settings.pop("extra_body", {})}
    return running.client.completions.create(model=MODEL, prompt=prompt, extra_body=extra, **{"temperature": 0, **settings})


def expected(prompt: Any, **params: Any) -> Completion:
    (completion,) = make_llm(tokenizer=tokenizer()).generate(prompt, SamplingParams(**params))
    return completion


def test_a_completion_is_that_of_the_model_alone(running: Running) -> None:
    ids = tokenizer()(TEXT).input_ids
    got = complete(running, TEXT, max_tokens=9)
    (choice,) = got.choices
    assert choice.token_ids == oracle(ids, 9) and choice.prompt_token_ids == ids
    assert choice.text == tokenizer().decode(oracle(ids, 9), skip_special_tokens=True)
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("length", 0, None)
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (len(ids), 9, len(ids) + 9)
    assert got.object == "text_completion" and got.model == MODEL and got.id.startswith("cmpl-")


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"logprobs": 1, "echo": True}])
def test_a_streams_first_chunk_with_a_token_has_the_prompts_ids(running: Running, more: dict[str, Any]) -> None:
    chunks = [chunk.choices[0] for chunk in complete(running, TEXT, max_tokens=3, stream=True, **more)]
    ids = [getattr(chunk, "prompt_token_ids", None) for chunk in chunks if getattr(chunk, "token_ids", None)]
    assert ids == [tokenizer()(TEXT).input_ids, None, None]


def test_the_second_time_the_prompt_comes_from_the_cache_unless_salted(running: Running) -> None:
    prompt = random_prompts(31, 17)[0]
    counts = [complete(running, prompt).usage.prompt_tokens_details.cached_tokens for _ in range(2)]
    salted = complete(running, prompt, extra_body={"cache_salt": "mine"}).usage.prompt_tokens_details.cached_tokens
    assert (counts, salted) == ([0, 16], 0)


@pytest.mark.parametrize("prompt", [TEXT, [5, 6, 7], [TEXT, "She"], [[5, 6, 7], [8], [9, 10]]], ids=["text", "ids", "texts", "lists"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_form_of_prompt_streamed_or_not(running: Running, prompt: Any, stream: bool) -> None:
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    want = [expected(p, max_new_tokens=16) for p in prompts]  # 16 is the default of OpenAI's
    got = complete(running, prompt, stream=stream)
    if not stream:
        assert [(c.index, c.text, c.token_ids) for c in got.choices] == [(i, w.text, w.token_ids) for i, w in enumerate(want)]
        return
    parts = [choice for chunk in got for choice in chunk.choices]
    for index, each in enumerate(want):
        mine = [part for part in parts if part.index == index]
        assert "".join(part.text for part in mine) == each.text
        assert [token for part in mine for token in getattr(part, "token_ids", None) or []] == each.token_ids
        assert [getattr(part, "prompt_token_ids", None) for part in mine] == [each.prompt_token_ids] + [None] * (len(mine) - 1)
        assert [part.finish_reason for part in mine] == [None] * (len(mine) - 1) + ["length"]


@pytest.mark.parametrize("include", [False, True])
def test_a_stream_ends_with_the_usage_if_asked(running: Running, include: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if include else {}
    chunks = list(complete(running, TEXT, stream=True, max_tokens=5, **options))
    assert len({chunk.id for chunk in chunks}) == 1
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert [u.completion_tokens for u in usages] == ([5] if include else [])
    assert not include or (chunks[-1].choices == [] and chunks[-1].usage is not None)


def test_sampling_settings_reach_the_engine(running: Running) -> None:
    settings = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "frequency_penalty": 1.2, "presence_penalty": -0.7}
    extra = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2}
    got = complete(running, TEXT, max_tokens=12, extra_body=extra, **settings).choices[0]
    assert got.token_ids == expected(TEXT, max_new_tokens=12, **settings, **extra).token_ids
    assert got.token_ids != complete(running, TEXT, max_tokens=12, **{**settings, "seed": 8}, extra_body=extra).choices[0].token_ids


def test_without_a_temperature_tokens_are_sampled_at_1(running: Running) -> None:
    body = {"prompt": TEXT, "seed": 3, "max_tokens": 12, "return_token_ids": True}
    got = running.http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    assert got == expected(TEXT, max_new_tokens=12, temperature=1.0, seed=3).token_ids != expected(TEXT, max_new_tokens=12).token_ids


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_before_them(running: Running, stream: bool) -> None:
    text = expected(TEXT, max_new_tokens=16).text
    stop = text[6:8]
    want = expected(TEXT, max_new_tokens=16, stop=("~~~", stop))
    got = complete(running, TEXT, stop=["~~~", stop], stream=stream)
    choices = [choice for chunk in got for choice in chunk.choices] if stream else got.choices
    assert "".join(choice.text for choice in choices) == want.text == text[: text.index(stop)]
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", stop)


def test_stop_token_ids_end_it_with_the_token(running: Running) -> None:
    ids = expected(TEXT, max_new_tokens=16).token_ids
    got = complete(running, TEXT, extra_body={"stop_token_ids": [ids[4]]}).choices[0]
    assert got.token_ids == ids[: ids.index(ids[4]) + 1] and (got.finish_reason, got.stop_reason) == ("stop", ids[4])


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_generate(running: Running, stream: bool) -> None:
    want = expected(TEXT, max_new_tokens=6, logprobs=3)
    assert want.logprobs is not None
    texts = tokenizer().convert_ids_to_tokens(want.token_ids)
    got = complete(running, TEXT, max_tokens=6, logprobs=3, stream=stream)
    choices = [choice for chunk in got for choice in chunk.choices] if stream else got.choices
    found = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for each in found for token in each.tokens]
    assert tokens == [text.replace("Ġ", " ") for text in texts]
    values = [value for each in found for value in each.token_logprobs]
    assert values == pytest.approx([known[token] for known, token in zip(want.logprobs, want.token_ids, strict=True)], abs=1e-5)
    top = [sorted(likely.values()) for each in found for likely in each.top_logprobs]
    assert [len(row) for row in top] == [len(known) for known in want.logprobs]
    assert top[0] == pytest.approx(sorted(want.logprobs[0].values()), abs=1e-5)
    assert [offset for each in found for offset in each.text_offset] == list(range(6)), "one character per token"


def test_zero_logprobs_give_the_sampled_ones(running: Running) -> None:
    found = complete(running, TEXT, max_tokens=3, logprobs=0).choices[0].logprobs
    assert [len(row) for row in found.top_logprobs] == [1, 1, 1] and all(value < 0 for value in found.token_logprobs)


def test_concurrent_requests_share_batches_and_keep_their_tokens(running: Running) -> None:
    prompts = random_prompts(5, *range(3, 27))
    steps = running.engine.stats.steps
    with ThreadPoolExecutor(12) as pool:
        got = list(pool.map(lambda p: complete(running, p, max_tokens=20).choices[0].token_ids, prompts))
    assert got == [oracle(p, 20) for p in prompts]
    assert running.engine.stats.steps - steps < 20 * len(prompts) / 2


def test_max_tokens_0_gives_no_token(running: Running) -> None:
    choice = complete(running, TEXT, max_tokens=0).choices[0]
    assert (choice.text, choice.token_ids, choice.finish_reason) == ("", [], "length")


def test_a_request_ends_at_the_models_last_position(running: Running) -> None:
    prompt = random_prompts(9, 250)[0]
    choice = complete(running, prompt, max_tokens=100).choices[0]
    assert (len(choice.token_ids), choice.finish_reason) == (7, "length")


def test_fields_that_ask_for_nothing_are_let_through(running: Running) -> None:
    neutral = {"n": 1, "best_of": 1, "echo": False, "suffix": None, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}}
    of_vllm = {
        "use_beam_search": False, "length_penalty": 1.0, "spaces_between_special_tokens": True, "seed": -1, "add_special_tokens": True,
        "truncate_prompt_tokens": None, "allowed_token_ids": None, "response_format": {"type": "text"},
    }  # fmt: skip
    got = complete(running, TEXT, max_tokens=1, user="me", extra_body=of_vllm, **neutral).choices[0].token_ids
    assert got == oracle(tokenizer()(TEXT).input_ids, 1)


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"regex": "a{3}"}}, {"structured_outputs": {"choice": ["aaa"]}}, {"guided_choice": ["aaa"]},
        {"structured_outputs": {"grammar": 'start: "aaa"', "disable_any_whitespace": False}}, {"guided_regex": "aaa"},
        {"structured_outputs": {"choice": ["a(.*)|b?\\"]}}, {"structured_outputs": {"choice": ["a b", "a b"]}},
    ],
    ids=str,
)  # fmt: skip
def test_what_an_answer_follows_has_vllms_names_too(running: Running, asked: dict[str, Any]) -> None:
    choice = complete(running, TEXT, max_tokens=20, extra_body=asked).choices[0]
    wanted = asked.get("structured_outputs", {}).get("choice", ["aaa"])[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (wanted, "stop", None)


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "one", "schema": {"const": 7}}}},
        {"structured_outputs": {"json": {"const": 7}}}, {"structured_outputs": {"json": '{"const": 7}'}}, {"guided_json": {"const": 7}},
    ],
    ids=str,
)  # fmt: skip
def test_schemas_under_each_of_their_names(running: Running, asked: dict[str, Any]) -> None:
    assert complete(running, TEXT, max_tokens=20, extra_body=asked).choices[0].text == "7"


def test_tokens_may_be_called_by_their_ids(running: Running) -> None:
    got = complete(running, TEXT, max_tokens=3, logprobs=2, echo=True, extra_body={"return_tokens_as_token_ids": True}).choices[0]
    assert got.logprobs.tokens == [f"token_id:{token}" for token in [*got.prompt_token_ids, *got.token_ids]]
    assert all(name.startswith("token_id:") for likely in got.logprobs.top_logprobs[1:] for name in likely)
    assert got.logprobs.text_offset == list(range(len(TEXT) + 3)), "one character per token, whatever they are called"


def test_an_end_token_is_no_stop_reason_and_one_that_was_asked_for_is() -> None:
    ids = tokenizer()(TEXT).input_ids
    end = oracle(ids, 6)[3]
    model = copy.deepcopy(tiny())
    model.generation_config.eos_token_id = end
    with serving(lambda: make_engine(model, chat_tokenizer())) as own:
        for asked, wanted in (({}, None), ({"stop_token_ids": [end]}, end), ({"stop_token_ids": [end], "ignore_eos": True}, end)):
            for stream in (False, True):
                got = complete(own, TEXT, stream=stream, extra_body=asked)
                last = [choice for chunk in got for choice in chunk.choices][-1] if stream else got.choices[0]
                assert (last.finish_reason, last.stop_reason) == ("stop", wanted)


def test_every_event_has_the_usage_up_to_it_if_asked(running: Running) -> None:
    chunks = list(complete(running, [TEXT, "She"], stream=True, max_tokens=4, stream_options={"continuous_usage_stats": True}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == [*range(1, 9), 8] and chunks[-1].choices == []
    assert {chunk.usage.total_tokens - chunk.usage.completion_tokens for chunk in chunks} == {len(TEXT) + len("She")}
    both = {"include_usage": False, "continuous_usage_stats": True}
    reply = running.http.post("/v1/completions", json={"prompt": TEXT, "stream": True, "stream_options": both})
    assert reply.status_code == 400 and "got true beside include_usage=false; leave one of them out" in reply.text


def test_a_model_with_several_names_has_the_first_in_its_answers() -> None:
    with serving(model_name=("one", "two", "one")) as own:
        assert [model.id for model in own.client.models.list()] == ["one", "two"]
        for name in ("one", "two"):
            assert own.client.completions.create(model=name, prompt=TEXT, max_tokens=1).model == "one"
            found = own.client.models.retrieve(name)
            assert found.id == name and not hasattr(found, "parent")
        with pytest.raises(openai.NotFoundError, match="there is no model 'three'; this server has 'one', 'two'"):
            own.client.completions.create(model="three", prompt=TEXT)


def test_models_are_listed(running: Running) -> None:
    assert [model.id for model in running.client.models.list()] == [MODEL]
    assert running.client.models.retrieve(MODEL).max_model_len == 256  # type: ignore[attr-defined]
