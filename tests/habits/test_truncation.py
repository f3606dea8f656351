"""`truncate_prompt_tokens`, as vLLM has it: the end of a prompt that is continued, the beginning of a text that is embedded."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

import paged_attn
from paged_attn import LLM, AsyncLLM, SamplingParams
from paged_attn.truncation import Cut, ids_of_text
from tests.engine.models import make_llm, oracle, random_prompts, tokenizer
from tests.engine.pooling.models import classifier
from tests.server.serving import Running, chat_tokenizer, serving

DEMO = Path(paged_attn.__file__).parent / "demo_model"
LONG = "It was a dark night, and nobody had seen it so dark before. " * 8
JSON = {"Content-Type": "application/json"}


def with_ends() -> Any:
    """A tokenizer that puts ! before a text and ? after it."""
    own = copy.deepcopy(tokenizer())
    own._tokenizer.post_processor = TemplateProcessing(single="! $A ?", pair="! $A ? $B ?", special_tokens=[("!", 2), ("?", 32)])
    return own


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_is_cut_as_transformers_cuts_it(side: str) -> None:
    own = with_ends()
    for most in (1, 2, 3, 4, 7, 50, 1000):
        cut = ids_of_text(own, LONG[:60], Cut(most, side == "left"))
        theirs = copy.deepcopy(own)
        theirs.truncation_side = side
        if most > 2:  # for less it has an error, and here the added tokens are cut, too
            assert cut == theirs(LONG[:60], truncation=True, max_length=most).input_ids
        assert len(cut) == min(most, 62)


def test_a_continuation_is_of_the_last_tokens() -> None:
    llm = make_llm(tokenizer=with_ends(), num_pages=16)  # room for 60 tokens
    ids = random_prompts(1, 100)[0]
    (cut,) = llm.generate([ids], SamplingParams(max_tokens=6, truncate_prompt_tokens=10))
    assert cut.prompt_token_ids == ids[-10:] and cut.token_ids == oracle(ids[-10:], 6)
    (cut,) = llm.generate([LONG], SamplingParams(max_tokens=6, truncate_prompt_tokens=10))
    assert cut.prompt_token_ids == [2, *tokenizer()(LONG).input_ids[-8:], 32] and cut.prompt == LONG
    for new in (1, 6, None):
        (cut,) = llm.generate([ids], SamplingParams(max_tokens=new, truncate_prompt_tokens=-1))
        assert len(cut.prompt_token_ids) == 60 - ((new or 1) - 1) and len(cut.token_ids) == (new or 1)
    (whole,) = llm.generate([ids[:5]], SamplingParams(max_tokens=6, truncate_prompt_tokens=10))
    assert whole.prompt_token_ids == ids[:5]
    with pytest.raises(ValueError, match=r"truncate_prompt_tokens: got 0; allowed: an int >= 1, or -1 for as many as there is room for"):
        SamplingParams(truncate_prompt_tokens=0)
    with pytest.raises(TypeError, match=r"truncate_prompt_tokens: got True \(bool\)"):
        SamplingParams(truncate_prompt_tokens=True)


def test_from_asyncio() -> None:
    async def run() -> None:
        async with AsyncLLM(DEMO, device="cpu", dtype="float32", num_pages=16) as llm:
            params = SamplingParams(max_tokens=2, truncate_prompt_tokens=9)
            (cut,) = await llm.generate(LONG, params)
            assert cut.prompt_token_ids == llm.get_tokenizer()(LONG).input_ids[-9:]

    asyncio.run(run())


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    own = with_ends()
    own.chat_template = chat_tokenizer().chat_template
    with serving(lambda: make_llm(tokenizer=own, num_pages=16).engine) as running:
        yield running
        running.wait_idle()


def ask(running: Running, route: str, **fields: Any) -> dict[str, Any]:
    body = {"max_tokens": 4, "temperature": 0, "return_token_ids": True, **fields}
    return dict(running.http.post(f"/v1/{route}", json=body).raise_for_status().json())


def test_over_http(running: Running) -> None:
    text = tokenizer()(LONG * 400).input_ids
    found = ask(running, "completions", prompt=LONG * 400, truncate_prompt_tokens=10, echo=True, logprobs=0)  # 192,000 characters
    (choice,) = found["choices"]
    assert choice["prompt_token_ids"] == [2, *text[-8:], 32] and found["usage"]["prompt_tokens"] == 10
    assert choice["text"].startswith(tokenizer().decode(choice["prompt_token_ids"])) and len(choice["logprobs"]["tokens"]) == 14
    (choice,) = ask(running, "completions", prompt=text, truncate_prompt_tokens=-1)["choices"]
    assert choice["prompt_token_ids"] == text[-57:] and len(choice["token_ids"]) == 4
    chat = ask(running, "chat/completions", messages=[{"role": "user", "content": LONG}], truncate_prompt_tokens=12)["choices"][0]
    assert chat["prompt_token_ids"] == tokenizer()(f"user> {LONG}; assistant>").input_ids[-12:], "a template has its own special tokens"


def test_embeddings_are_of_the_first_tokens() -> None:
    with LLM(DEMO, task="embed", device="cpu", dtype=torch.float32, num_pages=64) as llm:
        ids = llm.tokenizer(LONG).input_ids
        (cut,) = llm.embed(LONG, truncate_prompt_tokens=9)
        (first,) = llm.embed([ids[:9]])
        assert cut.prompt_token_ids == ids[:9] and cut.outputs.embedding == pytest.approx(first.outputs.embedding, abs=1e-6)
        (score,) = llm.score(LONG, LONG + "end", truncate_prompt_tokens=9)
        assert score.outputs.score == pytest.approx(1.0, abs=1e-5)
        with serving(lambda: llm.engine, model_name="demo") as running:
            asked = {"input": [LONG, ids], "truncate_prompt_tokens": 9}
            reply = running.http.post("/v1/embeddings", json=asked).raise_for_status().json()
            for each in reply["data"]:
                assert each["embedding"] == pytest.approx(first.outputs.embedding, abs=1e-6)
            assert reply["usage"]["prompt_tokens"] == 18
            asked = {"text_1": LONG, "text_2": LONG + "x", "truncate_prompt_tokens": 9}
            assert running.http.post("/v1/score", json=asked).json()["data"][0]["score"] == pytest.approx(1.0, abs=1e-5)
            refused = running.http.post("/v1/rerank", json={"query": "a", "documents": ["b"], "truncate_prompt_tokens": -2})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("pair", [(LONG, "short"), ("short", LONG), (LONG, LONG[7:])])
def test_of_a_pair_in_one_row_the_longer_text_is_shortened(pair: tuple[str, str]) -> None:
    model = classifier("bert", labels=1)
    own = with_ends()
    own.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    with LLM(model, tokenizer=own, num_pages=64) as llm:
        (cut,) = llm.score(*pair, truncate_prompt_tokens=20)
        row = own(*pair, truncation="longest_first", max_length=20, return_token_type_ids=True)
        assert cut.prompt_token_ids == row.input_ids and len(row.input_ids) == 20
        ids, types = torch.tensor([row.input_ids]), torch.tensor([row.token_type_ids])
        expected = model(ids, token_type_ids=types, attention_mask=torch.ones_like(ids)).logits.sigmoid()
        assert cut.outputs.score == pytest.approx(expected.item(), abs=1e-5)
