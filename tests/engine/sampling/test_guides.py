"""Answers that follow a schema, an expression or a grammar: the best tokens among those allowed, and nobody else's tokens change."""

from __future__ import annotations

import copy
import functools
import json
import random
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from paged_attn import SamplingParams
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.backends.selection import packages
from paged_attn.engine.requests.outputs import FinishReason
from paged_attn.engine.sampling.structured import guides
from paged_attn.engine.sampling.structured.guides import Guides
from tests.engine.models import assert_idle, bytes_tokenizer, make_engine, make_llm, oracle, random_prompts, tiny, tokenizer
from tests.soak.build import Faults
from tests.tiny_models import VOCAB

COMPACT = {"x-guidance": {"whitespace_flexible": False}}
PERSON = {
    "type": "object", "required": ["name", "age", "tags"], "additionalProperties": False, **COMPACT,
    "properties": {
        "name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 1, "maxItems": 3},
    },
}  # fmt: skip
NESTED: dict[str, Any] = functools.reduce(lambda inner, _: {"type": "array", "items": inner}, range(300), {"type": "integer"})
END = 5


def text_of(tokens: Sequence[int]) -> str:
    return str(tokenizer().decode(list(tokens)))


def ids_of(text: str) -> list[int]:
    ids: list[int] = tokenizer()(text).input_ids
    return ids


@functools.cache
def with_end() -> PreTrainedModel:
    """A model with an end token, which is a character as well."""
    model = copy.deepcopy(tiny())
    model.generation_config.eos_token_id = END
    return model


def best_in(words: Sequence[str], model: PreTrainedModel, prompt: list[int], end: int | None = None) -> list[int]:
    """The unmodified model's best token among those that lead to one of the words, until it has one that nothing can follow."""
    spelled = [ids_of(word) for word in words]
    answer: list[int] = []
    while True:
        near = [word for word in spelled if word[: len(answer)] == answer]
        allowed = {word[len(answer)] for word in near if len(word) > len(answer)}
        if not allowed:
            return answer
        if end is not None and answer in near:
            allowed.add(end)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, -1]
        answer.append(max(sorted(allowed), key=lambda token: float(logits[token])))
        if answer[-1] == end:
            return answer


def words(rng: random.Random, count: int) -> list[str]:
    return ["".join(rng.choice("abcdef") for _ in range(rng.randint(1, 9))) for _ in range(count)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_pages", [128, 30])
def test_the_best_tokens_among_the_allowed_ones_beside_requests_without_a_guide(overlap: bool, num_pages: int) -> None:
    rng, prompts = random.Random(3), random_prompts(8, *range(3, 15))
    choices = [[word + "!" for word in words(rng, 40)] for _ in prompts]
    llm = make_llm(tokenizer=tokenizer(), overlap=overlap, num_pages=num_pages, max_batch_tokens=16)
    guided = [SamplingParams(max_new_tokens=12, regex="|".join(choice) if i % 2 else None) for i, choice in enumerate(choices)]
    got = llm.generate(prompts, guided)
    for prompt, choice, params, completion in zip(prompts, choices, guided, got, strict=True):
        want = oracle(prompt, 12) if params.regex is None else best_in(choice, tiny(), prompt)
        assert completion.token_ids == want
        assert completion.finish_reason == ("length" if params.regex is None else "stop") and completion.stop_reason is None
    assert_idle(llm.engine)


def test_an_end_token_comes_where_an_answer_may_end_and_nowhere_else() -> None:
    rng, prompts = random.Random(4), random_prompts(9, *range(3, 23))
    llm = make_llm(with_end(), tokenizer())
    choices = [words(rng, 60) for _ in prompts]
    got = llm.generate(prompts, [SamplingParams(regex="|".join(choice)) for choice in choices])
    want = [best_in(choice, with_end(), prompt, END) for prompt, choice in zip(prompts, choices, strict=True)]
    assert [completion.token_ids for completion in got] == want
    assert {completion.token_ids[-1] == END for completion in got} == {False, True}, "some end for want of a way on, some by the token"
    assert {completion.stop_reason for completion in got} == {None}


def test_an_end_token_that_is_text_as_well_ends_nothing_too_early() -> None:
    """Its text may come there, but the token would end the answer in the middle."""
    llm = make_llm(with_end(), tokenizer())
    most_likely = SamplingParams(regex=f"[a-f{text_of([END])}]{{4}}x?", logit_bias={END: 100.0})
    (got,) = llm.generate([[7, 8, 9]], most_likely)
    assert got.token_ids.index(END) == 4 == len(got.token_ids) - 1 and got.finish_reason == FinishReason.STOP
    (got,) = llm.generate([[7, 8, 9]], SamplingParams(json_schema={"type": "string", "maxLength": 5, **COMPACT}, logit_bias={END: 100.0}))
    assert isinstance(json.loads(text_of([token for token in got.token_ids if token != END])), str)


def test_drawn_answers_follow_their_schema_and_their_seed() -> None:
    llm = make_llm(tokenizer=tokenizer())
    params = [SamplingParams(max_new_tokens=200, temperature=1.5, seed=seed, json_schema=PERSON) for seed in range(12)]
    prompts = random_prompts(1, *[7] * 12)
    got = llm.generate(prompts, params)
    for completion in got:
        answer = json.loads(completion.text)
        assert list(answer) == ["name", "age", "tags"] and len(answer["name"]) <= 6 and 0 <= answer["age"] <= 150
        assert 1 <= len(answer["tags"]) <= 3 and set(answer["tags"]) <= {"a", "bc"}
    assert len({completion.text for completion in got}) > 8
    assert [llm.generate(p, s)[0].token_ids for p, s in zip(prompts[:3], params, strict=False)] == [c.token_ids for c in got[:3]]


def test_a_grammar_of_its_own_and_one_cut_by_the_limit() -> None:
    llm = make_llm(tokenizer=tokenizer())
    grammar = 'start: item ("," item)* "."\nitem: /[x-z]{2}/ | "(" start ")"'
    for seed in range(6):
        (whole,) = llm.generate([3], SamplingParams(max_new_tokens=200, grammar=grammar, temperature=1.0, seed=seed, logit_bias={15: 2}))
        assert (
            whole.finish_reason == "stop" and re.fullmatch(r"[x-z,.()]+\.", whole.text) and whole.text.count("(") == whole.text.count(")")
        )
    (cut,) = llm.generate([3], SamplingParams(max_new_tokens=4, regex="[a-c]{9}"))
    assert cut.finish_reason == "length" and re.fullmatch("[a-c]{4}", cut.text)
    (just,) = llm.generate([3], SamplingParams(max_new_tokens=4, regex="[a-c]{4}"))
    assert just.finish_reason == "stop", "it is whole with its last token"


def test_a_grammar_may_be_written_as_llama_cpp_has_them() -> None:
    """The same tokens as of Lark's form; `::=` in a text of Lark's is no rule of the other form."""
    gbnf = 'root ::= item ("," item)* "."  # vLLM and SGLang call it EBNF\nitem ::= [x-z]{2} | "::=" | my-own\nmy-own ::= "(" root ")"'
    lark = 'start: item ("," item)* "."\nitem: /[x-z]{2}/ | "::=" | "(" start ")"'
    llm = make_llm(tokenizer=tokenizer())
    drawn = [
        llm.generate([3], SamplingParams(max_new_tokens=60, grammar=text, temperature=1.0, seed=4, logit_bias={15: 2}))[0].token_ids
        for text in (gbnf, lark)
    ]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("streamed", [False, True])
def test_stop_strings_penalties_and_logprobs_work_beside_a_guide(streamed: bool) -> None:
    llm = make_llm(tokenizer=tokenizer())
    params = SamplingParams(regex="[ab]{3}c[ab]{40}", stop=("c",), logprobs=2, repetition_penalty=1.3)
    if streamed:
        events = list(llm.stream([7, 8], params))
        text, reason, known = "".join(event.text for event in events), events[-1].finish_reason, [event.logprob for event in events]
    else:
        (whole,) = llm.generate([[7, 8]], params)
        text, reason, known = whole.text, whole.finish_reason, list(whole.logprobs or [])  # type: ignore[arg-type]
    assert re.fullmatch("[ab]{3}", text) and reason == "stop" and len([each for each in known if each is not None]) == 4


@pytest.mark.parametrize("where", Faults.WHERE)
def test_a_failed_step_takes_nothing_in_twice(where: str) -> None:
    engine = make_engine(tokenizer=tokenizer())
    choice, prompt = words(random.Random(5), 50), [9, 8, 7, 6, 5]
    want = best_in(choice, tiny(), prompt)
    request = engine.add_request(prompt, SamplingParams(regex="|".join(choice)))
    faults = Faults(engine, random.Random(0))
    for turn in range(100):
        faults._armed = where if turn in (0, 2, 3, 5, 6) else None
        try:
            engine.step()
        except RuntimeError:
            continue
        if not engine.has_work:
            break
    assert request.tokens[len(prompt) :] == want and faults.injected >= 2
    faults.remove()


def test_an_answer_that_can_not_go_on_ends_alone_with_the_reason() -> None:
    engine = make_engine(tokenizer=tokenizer())
    lost = engine.add_request([5, 6, 7], SamplingParams(regex="[a-f]{30}"))
    other = engine.add_request([8, 9], SamplingParams(regex="[a-f]{6}"))
    while len(lost.tokens) < 5:
        engine.step()
    assert lost.sampling.guide is not None
    lost.sampling.guide.goes_on_after(ids_of("z")[0])  # not what was chosen
    while engine.has_work:
        engine.step()
    assert lost.finish_reason is FinishReason.ERROR and "regex: " in str(lost.error) and "doesn't satisfy the grammar" in str(lost.error)
    assert "<state>" not in str(lost.error)
    assert other.finish_reason is FinishReason.STOP and re.fullmatch("[a-f]{6}", text_of(other.tokens[2:]))
    assert_idle(engine)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"json_schema": {"not": {}}}, "json_schema: Unimplemented keys"),
        ({"json_schema": {"type": "objec"}}, "json_schema: Invalid type: objec"),
        ({"regex": "a(b"}, "regex: .*unclosed group"),
        ({"grammar": "start: x"}, 'grammar: .*unknown name: "x"'),
        ({"grammar": 'root ::= "a" other'}, "grammar: .*GBNF.*Rule 'other' not found"),
        ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "grammar: .*GBNF.*recursion"),
        ({"grammar": "start: start"}, "grammar: no answer can follow it; got 'start: start'"),
        ({"json_schema": {"$ref": "#"}}, "json_schema: no answer can follow it"),
        ({"json_schema": {"$ref": "file:///etc/passwd"}}, "json_schema: .*does not fetch"),
        ({"json_schema": NESTED}, "json_schema: recursion limit exceeded"),
        ({"json_schema": '{"items":' * 20_000 + "{}" + "}" * 20_000}, "json_schema: got what is not a JSON object .*recursion"),
        # Its masks take 40 ms of the 100 that one may take, and more where other processes share the core.
        ({"regex": "(a{1000}){1000}"}, "regex: (lexer error: too many|finding out which token may come next takes more than 0.1 s)"),
        ({"regex": "(" * 20_000 + "a" + ")" * 20_000}, "regex: .*nest"),
        ({"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000}, "grammar: .*too deeply nested"),
    ],
)
def test_what_can_not_be_read_is_refused_in_the_readers_words(settings: dict[str, Any], words: str) -> None:
    llm = make_llm(tokenizer=tokenizer())
    with pytest.raises(ValueError, match=re.compile(words, re.DOTALL)):
        llm.generate([3], SamplingParams(**settings))
    assert_idle(llm.engine)
    assert llm.generate([3], SamplingParams(max_new_tokens=2))[0].token_ids == oracle([3], 2)


def test_without_llguidance_or_a_tokenizer_it_is_refused_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"regex needs the model's tokenizer: LLM\(model, tokenizer=...\)"):
        make_llm().generate([[3]], SamplingParams(regex="a"))
    with pytest.raises(UnsupportedError, match="of this one it says: Only fast tokenizers are supported"):
        Guides([object()], 4, frozenset({END})).guide(SamplingParams(regex="a"))
    llm = make_llm(tokenizer=tokenizer())
    with monkeypatch.context() as older:  # than takes several end tokens; vLLM 0.20 wants one of these
        older.setattr(packages.importlib.metadata, "version", lambda name: "1.3.0")
        with pytest.raises(UnsupportedError, match=r"regex: needs llguidance 1.8 or newer, found 1.3.0: pip install .*\[structured\]'"):
            llm.generate([3], SamplingParams(regex="a"))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=r"json_schema: llguidance 1.8 is not installed: pip install .*\[structured\]'"):
        llm.generate([3], SamplingParams(json_schema={}))
    assert llm.generate([3], SamplingParams(max_new_tokens=2))[0].token_ids == oracle([3], 2)


def allowed_by(made: Guides, **settings: Any) -> list[int]:
    guide = made.guide(SamplingParams(**settings))
    assert guide is not None
    return np.flatnonzero(np.unpackbits(guides.allowed_next([guide]).numpy().view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("vocab_size", [None, VOCAB, VOCAB + 1, 200])
def test_tokens_that_are_no_text_are_never_allowed(vocab_size: int | None) -> None:
    """Models have more tokens than their tokenizers, and one that has no end token gets none."""
    made = Guides(tokenizer(), vocab_size, frozenset())
    assert allowed_by(made, regex="(.|\n)*") == list(range(1, VOCAB)), "all but the padding"
    assert allowed_by(Guides(tokenizer(), vocab_size, frozenset({END})), regex="a*") == [END, ids_of("a")[0]]


def test_what_was_read_last_is_kept_and_shared_without_being_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made, reads = Guides(tokenizer(), VOCAB, frozenset()), []
    read = made._read
    monkeypatch.setattr(made, "_read", lambda *what: reads.append(what) or read(*what))
    monkeypatch.setattr(guides, "MAX_KEPT", 3)
    for regex in ("aa", "bb", "aa", "cc", "dd", "aa", "bb"):
        guide = made.guide(SamplingParams(regex=regex))
        assert guide is not None and guide.goes_on_after(ids_of(regex)[0]) and not guide.goes_on_after(ids_of(regex)[1])
    assert [source for _, source in reads] == ["aa", "bb", "cc", "dd", "bb"]


def taken(made: Guides, text: str, **settings: Any) -> int:
    """How many characters of the text the guide lets through."""
    guide = made.guide(SamplingParams(**settings))
    assert guide is not None
    for count, token in enumerate(made_of(text)):
        if not guides.allowed_next([guide])[0, token // 32] >> token % 32 & 1:
            return count
        guide.goes_on_after(token)
    return len(text)


def made_of(text: str) -> list[int]:
    ids: list[int] = bytes_tokenizer()(text).input_ids
    assert len(ids) == len(text)
    return ids


def test_json_may_be_indented_but_not_for_ever() -> None:
    made = Guides(bytes_tokenizer(), 257, frozenset())
    usual = ['{"a":[1,2]}', '{"a": [1, 2]}', '{\n  "a": [\n    1,\n    2\n  ]\n}']
    assert [taken(made, text, json_schema={"type": "object"}) for text in usual] == [len(text) for text in usual]
    assert taken(made, "{\n" + " " * 60, json_schema={"type": "object"}) == 42
    assert taken(made, "{\n\n", json_schema={"type": "object"}) == 2
    assert taken(made, "{ ", json_schema={"type": "object", **COMPACT}) == 1, "the schema may say otherwise"


@pytest.mark.parametrize("vocab", [VOCAB, 64, 70, 200])
def test_rows_without_a_guide_are_left_alone_whatever_the_width_of_the_logits(vocab: int) -> None:
    made = Guides(tokenizer(), None, frozenset({END}))
    some = {row: made.guide(SamplingParams(regex=regex)) for row, regex in ((4, "a|b"), (1, "!*"))}
    scores = torch.randn(6, vocab)
    kept = scores.clone()
    guides.forbid_others(scores, some)  # type: ignore[arg-type]
    allowed = {4: ids_of("ab"), 1: [END, *ids_of("!")]}
    for row in range(6):
        left = [token for token in allowed.get(row, range(vocab)) if token < vocab]
        assert torch.equal(scores[row, left], kept[row, left]) and scores[row].isfinite().sum() == len(left)
