"""Whatever a caller gets wrong raises with what was wrong; afterwards the engine works and holds no page of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from paged_attn import LLM, EngineConfig, SamplingParams, UnsupportedError
from tests.engine.models import assert_nothing_left, make_llm, oracle, random_prompts, tiny, tokenizer
from tests.tiny_models import VOCAB, build

GOOD = random_prompts(0, 6, 19)
GREEDY = SamplingParams(max_new_tokens=8)
Call = Callable[[LLM], Any]

PROMPT_ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "empty": ([], ValueError, "the prompt is empty"),
    "too long": ([1] * 257, ValueError, "257 tokens > 256, the model's positions; shorten it by 1"),
    "an id of 70 bits": ([5, 2**70], ValueError, "token id 1180591620717411303424 at position 1 of the prompt is out of range"),
    "bytes that may be written": (bytearray(b"12345678"), TypeError, "tokenize it first"),
    "negative id": ([5, -1], ValueError, "token id -1 at position 1 of the prompt is out of range"),
    "id beyond the vocabulary": ([VOCAB], ValueError, f"token id {VOCAB} at position 0 .* ids 0 to {VOCAB - 1}"),
    "floats": ([1.0, 2.0], TypeError, "a prompt of token ids is a list"),
    "float tensor": (torch.tensor([1.0]), TypeError, "a prompt of token ids is"),
    "a batch as one prompt": (torch.tensor([[1, 2], [3, 4]]), TypeError, "a prompt of token ids is"),
    "texts as one prompt": (["a", "b"], TypeError, "a prompt of token ids is a list"),
    "nothing": (None, TypeError, "a prompt of token ids is a NoneType"),
    "a number": (7, TypeError, "a prompt of token ids is a int"),
    "bytes": (b"abc", TypeError, "a prompt of token ids is b'abc'"),
    "text without a tokenizer": ("text", ValueError, "a prompt is text, but there is no tokenizer"),
}
CALL_ERRORS: dict[str, tuple[Call, type[Exception], str]] = {
    "prompts is a number": (lambda llm: llm.generate(7), TypeError, "prompts is a int; allowed are"),  # type: ignore[arg-type]
    "prompts is None": (lambda llm: llm.generate(None), TypeError, "prompts is a NoneType"),  # type: ignore[arg-type]
    "prompts is a dict": (lambda llm: llm.generate({"ids": [1]}), TypeError, "a prompt is a mapping of 'ids'"),  # type: ignore[arg-type]
    "prompts is bytes": (lambda llm: llm.generate(b"text"), TypeError, "prompts is a bytes"),  # type: ignore[arg-type]
    "too few params": (lambda llm: llm.generate(GOOD, [GREEDY]), ValueError, "1 SamplingParams for 2 prompts"),
    "too many params": (lambda llm: llm.generate(GOOD[0], [GREEDY] * 2), ValueError, "2 SamplingParams for 1 prompts"),
    "params is a dict": (lambda llm: llm.generate(GOOD, {"temperature": 1}), TypeError, "params holds"),  # type: ignore[arg-type]
    "params is an empty dict": (lambda llm: llm.generate(GOOD, {}), TypeError, "params holds {}"),  # type: ignore[arg-type]
    "params holds None": (lambda llm: llm.generate(GOOD, [GREEDY, None]), TypeError, "params holds None"),  # type: ignore[list-item]
    "stop without a tokenizer": (lambda llm: llm.generate(GOOD, SamplingParams(stop="x")), ValueError, "stop strings need a tokenizer"),
    "a namespace that does not hash": (
        lambda llm: llm.stream(GOOD, namespace=["a"]),
        TypeError,
        r"namespace is \['a'\]; allowed is what can",
    ),
    "an adapter that is not a name": (lambda llm: llm.generate(GOOD, GREEDY, lora=5), TypeError, "lora is 5; allowed: the name"),  # type: ignore[arg-type]
    "a mask of another length": (
        lambda llm: llm.generate({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1]]}, GREEDY),
        ValueError,
        "mask has rows of 2 entries",  # type: ignore[arg-type]
    ),
    "can never fit": (lambda llm: llm.generate([[1] * 200] * 2, SamplingParams(max_new_tokens=50)), UnsupportedError, "can never fit"),
    "negative temperature": (lambda llm: llm.generate(GOOD, SamplingParams(temperature=-1)), ValueError, "temperature: got -1"),
    "duplicate id": (lambda llm: [llm.engine.add_request([1], request_id="twice") for _ in range(2)], ValueError, "'twice' is in use"),
}


@pytest.fixture
def llm() -> Iterator[LLM]:
    made = make_llm(num_pages=51)  # 200 tokens
    yield made
    for request_id in list(made.engine.requests):
        assert request_id == "twice", "a refused call left a request behind"
        made.engine.cancel(request_id)
    assert_nothing_left(made)
    assert [c.token_ids for c in made.generate(GOOD, GREEDY)] == [oracle(p, 8) for p in GOOD]
    assert_nothing_left(made)


@pytest.mark.parametrize("name", PROMPT_ERRORS)
@pytest.mark.parametrize("method", ["generate", "stream"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_bad_prompt_is_refused_with_those_beside_it(llm: LLM, method: str, name: str, position: int) -> None:
    bad, error, message = PROMPT_ERRORS[name]
    prompts = [*GOOD[:position], bad, *GOOD[position:]]
    if position == 0 and isinstance(bad, int):
        prompts = [*GOOD, bad]  # a list that begins with a number is one prompt
    with pytest.raises(error, match=message):
        getattr(llm, method)(prompts, GREEDY)


@pytest.mark.parametrize("name", CALL_ERRORS)
def test_a_bad_call_is_refused(llm: LLM, name: str) -> None:
    call, error, message = CALL_ERRORS[name]
    with pytest.raises(error, match=message):
        call(llm)


@pytest.mark.parametrize("name", [name for name in PROMPT_ERRORS if name != "text without a tokenizer"])
def test_the_engine_refuses_bad_prompts_while_others_run(llm: LLM, name: str) -> None:
    bad, error, message = PROMPT_ERRORS[name]
    stream = llm.stream(GOOD[1], GREEDY)
    got = [next(stream).token_id]
    with pytest.raises(error, match=message):
        llm.engine.add_request(bad, GREEDY)
    assert got + [event.token_id for event in stream] == oracle(GOOD[1], 8)


def test_a_text_given_to_the_engine_is_not_taken_for_ids(llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"'123'.*tokenize it first"):
        llm.engine.add_request("123", GREEDY)  # type: ignore[arg-type]


def test_the_engine_refuses_stop_strings_without_a_tokenizer(llm: LLM) -> None:
    with pytest.raises(ValueError, match="without a tokenizer"):
        llm.engine.add_request([1], SamplingParams(stop="x"))


def test_an_empty_text_is_an_empty_prompt() -> None:
    llm = make_llm(tokenizer=tokenizer())
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.generate(["fine", ""], GREEDY)
    assert_nothing_left(llm)


def test_the_note_tells_which_prompt_it_was(llm: LLM) -> None:
    with pytest.raises(ValueError, match="out of range") as raised:
        llm.generate([GOOD[0], GOOD[1], [VOCAB]], GREEDY)
    assert raised.value.__notes__ == ["(prompt 3 of 3)"]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"pagesize": 4}, ValueError, r"unknown engine setting 'pagesize' \(did you mean page_size\?\); known: "),
        ({"tensor_parallel": 2}, ValueError, r"'tensor_parallel' \(as tensor_parallel_size: start the program under torchrun"),
        ({"kv_dtype": "fp8"}, ValueError, r"'kv_dtype' \(keys and values are kept in the model's dtype"),
        ({"config": EngineConfig(), "pagesize": 4}, ValueError, r"unknown engine setting 'pagesize' \(did you mean page_size\?\)"),
        ({"page_size": 0}, ValueError, "page_size is 0"),
        ({"page_size": "4"}, TypeError, "page_size is '4'"),
        ({"dtype": torch.bfloat16}, ValueError, r"dtype and device are for loading from a path.*model.to\(device, dtype\)"),
        ({"device": "cpu"}, ValueError, "dtype and device are for loading from a path"),
        ({"config": {"page_size": 4}}, TypeError, "config is a dict; allowed is an EngineConfig"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_built(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLM(nn.Module(), **settings)  # this module would be refused too, later


def test_an_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"flash_attention_9.*torch_native"):
        make_llm(backend="flash_attention_9")


def test_a_pool_that_holds_nothing_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="at least 2 are needed"):
        make_llm(num_pages=None, kv_memory_gib=0)


def test_a_model_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = build("qwen3")
    with pytest.raises(UnsupportedError, match=r"lies on \['meta'\]"):
        LLM(model)


@pytest.mark.parametrize("path", ["./no/such/model", "/no/such/model", "~/no such model"])
def test_a_path_without_a_model_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"no model at .*not a directory"):
        LLM(path)


def test_an_empty_directory_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"no model at .*has no config\.json"):
        LLM(tmp_path)


@pytest.mark.parametrize("model", [None, 7, {"a": 1}])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match=r"model is a .*; allowed are a loaded model, a directory or a hub id"):
        LLM(model)


def test_the_shared_model_was_not_harmed() -> None:
    assert all(parameter.isfinite().all() for parameter in tiny().parameters())
