"""Scores as people ask for them: vLLM's `prompt_logprobs`, OpenAI's `echo`, and what lm-evaluation-harness sends and reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import paged_attn
from paged_attn import LLM, SamplingParams
from tests.server.serving import Running, serving

DEMO = Path(paged_attn.__file__).parent / "demo_model"
TOLERANCE = 1e-4
# Contexts and continuations as the harness has them: a word's space belongs to the continuation.
PAIRS = [("It was a", " strong sight"), ("It was a", " truth universally acknowledged"), ("Emma could not", " é"), ("She", " had")]
TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. " * 3


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def llm(model: Any, tokenizer: Any) -> Iterator[LLM]:
    with LLM(model, tokenizer=tokenizer, num_pages=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    with serving(lambda: llm.engine, model_name="demo_model") as running:
        yield running


def rows(model: Any, ids: list[int]) -> list[list[float]]:
    """Log-probabilities [T, V] by the model itself."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1).tolist()


def likelihood(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The log-likelihood of a continuation, and whether it is greedy decoding's, from the model's own logits."""
    of = rows(model, context + continuation)[len(context) - 1 : -1]
    scored = [(row[i], max(row)) for row, i in zip(of, continuation, strict=True)]
    return sum(value for value, _ in scored), all(value == best for value, best in scored)


def pairs(tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    return [(tokenizer.encode(a), tokenizer.encode(a + b)[len(tokenizer.encode(a)) :]) for a, b in PAIRS]


def test_prompt_logprobs_as_vllm_gives_them(llm: LLM, model: Any, tokenizer: Any) -> None:
    for prompt in ("It was a dark night", TEXT):
        ids = tokenizer.encode(prompt)
        (completion,) = llm.generate(prompt, sampling_params=SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=1))
        scores = completion.prompt_logprobs
        assert scores is not None and scores[0] is None and len(scores) == len(ids) and len(completion.token_ids) == 1
        for token, row, got in zip(ids[1:], rows(model, ids), scores[1:], strict=False):
            assert got is not None and got == pytest.approx({token: row[token], row.index(max(row)): max(row)}, abs=TOLERANCE)


def test_a_stream_has_no_place_for_them_and_says_so(llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompt_logprobs is 1 in a stream, whose events are of new tokens; use generate"):
        llm.stream("It was", SamplingParams(prompt_logprobs=1))


def test_perplexity_of_texts_without_a_token(llm: LLM, model: Any, tokenizer: Any) -> None:
    for completion in llm.generate([TEXT, "She had"], SamplingParams(max_tokens=0, prompt_logprobs=0)):
        ids = completion.prompt_token_ids
        assert completion.prompt_logprobs is not None and completion.token_ids == []
        total = sum(row[token] for token, row in zip(ids[1:], completion.prompt_logprobs[1:], strict=True) if row is not None)
        assert total == pytest.approx(likelihood(model, ids[:1], ids[1:])[0], abs=TOLERANCE)


def read_likelihoods(answer: dict[str, Any], context_lengths: list[int]) -> list[tuple[float, bool]]:
    """What the harness makes of an answer: the new token is left out, and greedy is what no other token is above."""
    found = []
    for choice, start in zip(sorted(answer["choices"], key=lambda c: c["index"]), context_lengths, strict=True):
        values, tops = (choice["logprobs"][name][start:-1] for name in ("token_logprobs", "top_logprobs"))
        found.append((sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))))
    return found


@pytest.mark.parametrize("form", ["lists of ids", "a text"])
def test_the_harness_local_completions_scores(server: Running, model: Any, tokenizer: Any, form: str) -> None:
    """The bodies that lm_eval 0.4.13 sends for loglikelihood tasks; rolling ones are the same with the end token in front."""
    encoded = [*pairs(tokenizer), ([tokenizer.eos_token_id], tokenizer.encode(TEXT))]
    encoded.append(greedy_pair(model, encoded[0][0]))
    prompts: list[Any] = [[a + b for a, b in encoded]]
    if form == "a text":
        encoded = [(a, b) for a, b in encoded if tokenizer.encode(tokenizer.decode(a + b)) == a + b]
        prompts = [tokenizer.decode(a + b) for a, b in encoded]
    answers = []
    for prompt in prompts:
        body = {"model": "demo_model", "prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        reply = server.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        answers.append(reply.json())
    lengths = [len(a) for a, _ in encoded]
    found = (
        read_likelihoods(answers[0], lengths) if form == "lists of ids"
        else [read_likelihoods(answer, [length])[0] for answer, length in zip(answers, lengths, strict=True)]
    )  # fmt: skip
    expected = [likelihood(model, a, b) for a, b in encoded]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=TOLERANCE)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert {True, False} == {greedy for _, greedy in found}


def greedy_pair(model: Any, context: list[int]) -> tuple[list[int], list[int]]:
    ids = torch.tensor([context])
    new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)[0, len(context) :]
    return context, new.tolist()


def test_the_harness_local_completions_generates(server: Running, model: Any, tokenizer: Any) -> None:
    contexts = [tokenizer.encode(text) for text in ("It was a", "She had never")]
    body = {
        "prompt": contexts, "model": "demo_model", "max_tokens": 24, "temperature": 0.0, "stop": ["h", tokenizer.eos_token], "seed": 1234,
    }  # fmt: skip
    choices = server.http.post("/v1/completions", json=body).json()["choices"]
    for choice, context in zip(sorted(choices, key=lambda c: c["index"]), contexts, strict=True):
        ids = torch.tensor([context])
        new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)[0, len(context) :]
        assert choice["text"] == tokenizer.decode(new, skip_special_tokens=True).split("h")[0]


def test_openais_client_scores_a_text(server: Running, model: Any, tokenizer: Any) -> None:
    text = "It was a dark night"
    answer = server.client.completions.create(model="demo_model", prompt=text, echo=True, logprobs=2, max_tokens=0)
    found, ids = answer.choices[0].logprobs, tokenizer.encode(text)
    assert answer.choices[0].text == text and found.text_offset == list(range(len(text))), "the package's model reads bytes"
    own = rows(model, ids)
    assert found.token_logprobs[1:] == pytest.approx([own[i][token] for i, token in enumerate(ids[1:])], abs=TOLERANCE)


def test_a_character_of_several_tokens_counts_with_its_last(server: Running) -> None:
    answer = server.client.completions.create(model="demo_model", prompt="éa–b", echo=True, logprobs=1, max_tokens=0)
    assert answer.choices[0].logprobs.text_offset == [0, 0, 1, 2, 2, 2, 3], "2, 1, 3 and 1 bytes"


def test_bytes_that_never_are_a_character_count_as_what_stands_for_them(server: Running, tokenizer: Any) -> None:
    odd = [tokenizer.encode("é")[-1]] * 6
    answer = server.client.completions.create(model="demo_model", prompt=odd, echo=True, logprobs=1, max_tokens=0)
    assert answer.choices[0].text == "\ufffd" * 6 and answer.choices[0].logprobs.text_offset == [0, 0, 0, 0, 4, 4]
