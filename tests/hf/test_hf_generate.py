"""`custom_generate=paged_attn.generate` gives what transformers' own generate gives (tokens, padding, streams), and refuses the rest."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TypicalLogitsWarper
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

import paged_attn
from paged_attn import LLM, UnsupportedError
from paged_attn.hf.generate.request_params import settings_of
from tests.engine.models import tokenizer
from tests.recurrent_models import recurrent
from tests.tiny_models import build

SETTINGS: dict[str, Any] = {"num_pages": 128, "page_size": 4, "max_batch_tokens": 40, "prefix_wait_tokens": 8}
NEW = 14
OURS = paged_attn.generate_with(**SETTINGS)


@functools.cache
def tiny(name: str = "llama") -> PreTrainedModel:
    """One for all tests of this file: its engine is kept with it."""
    model = recurrent(name) if name == "mamba" else build(name, tie_word_embeddings=False)
    return model


def prompts(paddings: tuple[int, ...] = (0, 6, 13), length: int = 19) -> dict[str, Tensor]:
    ids = torch.randint(2, 96, (len(paddings), length), generator=torch.Generator().manual_seed(4))
    mask = torch.arange(length) >= torch.tensor(paddings)[:, None]
    return {"input_ids": ids.where(mask, 0), "attention_mask": mask.long()}


def both(model: PreTrainedModel, given: dict[str, Any], **keywords: Any) -> tuple[Any, Any]:
    """What transformers gives, and what we give."""
    keywords = {"max_new_tokens": NEW, "do_sample": False, **keywords}
    return model.generate(**given, **keywords), model.generate(**given, **keywords, custom_generate=OURS)


def assert_same(model: PreTrainedModel, given: dict[str, Any], **keywords: Any) -> Tensor:
    theirs, ours = both(model, given, **keywords)
    assert ours.dtype == torch.int64 and ours.equal(theirs), (theirs[:, 19:], ours[:, 19:])
    return ours


def end_of(model: PreTrainedModel, given: dict[str, Any], row: int, at: int) -> int:
    """A token that ends this row early, and the others later or not at all."""
    return int(model.generate(**given, max_new_tokens=NEW, do_sample=False)[row, given["input_ids"].shape[1] + at])


@pytest.mark.parametrize(
    "name", ["llama", pytest.param("qwen3", marks=pytest.mark.slow), "gemma3_text", "gpt2", pytest.param("mamba", marks=pytest.mark.slow)]
)
def test_greedy_tokens_of_a_ragged_batch(name: str) -> None:
    model, given = tiny(name), prompts()
    assert_same(model, given)
    ended = assert_same(model, given, eos_token_id=[end_of(model, given, 1, 3), end_of(model, given, 2, 5)], pad_token_id=1)
    assert (ended == 1).any()
    assert_same(model, {"input_ids": given["input_ids"][:1]})


@pytest.mark.parametrize(
    "keywords",
    [
        {"max_length": 25, "max_new_tokens": None},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "bad_words_ids": [[7], [9, 11]]},
        {"min_new_tokens": 9, "eos": 2},
        {"min_length": 26, "eos": 2},
        {"forced_eos_token_id": 5},
        {"sequence_bias": {(5,): 4.0}},
        {"suppress_tokens": [3, 4], "begin_suppress_tokens": [8]},
        {"exponential_decay_length_penalty": (3, 1.5), "eos": 4},
        {"eos": 2, "pad_token_id": None},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 5},
    ],
    ids=lambda keywords: next(iter(keywords)),
)
def test_settings_of_generate(keywords: dict[str, Any]) -> None:
    model, given = tiny(), prompts()
    if (at := keywords.pop("eos", None)) is not None:
        keywords = {"pad_token_id": 1, "eos_token_id": end_of(model, given, 0, at), **keywords}
    assert_same(model, given, **keywords)


@pytest.mark.slow
def test_the_models_generation_config_counts() -> None:
    model, given = build("llama", tie_word_embeddings=False), prompts()
    ours = paged_attn.generate_with(**SETTINGS)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = end_of(model, given, 0, 2), 3
    model.generation_config.max_new_tokens, model.generation_config.repetition_penalty = 9, 1.2
    assert model.generate(**given, custom_generate=ours).equal(model.generate(**given))
    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens = 4
    assert model.generate(**given, generation_config=config, custom_generate=ours).shape[1] == 23


def test_what_a_call_switches_off_of_the_models_generation_config_is_off() -> None:
    """The engine is made with the first call, and kept; what a call says counts, whatever the model's config says or said."""
    model, given = build("llama", tie_word_embeddings=False), prompts()
    ours = paged_attn.generate_with(**SETTINGS)
    config = model.generation_config
    config.do_sample, config.temperature, config.top_k, config.repetition_penalty = True, 1.5, 0, 1.8
    config.min_new_tokens = 200  # beyond what an engine has room for
    off: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.0, "min_new_tokens": 0, "max_new_tokens": NEW}
    assert model.generate(**given, **off, custom_generate=ours).equal(model.generate(**given, **off))
    config.repetition_penalty = 1.4
    on = {**off, "repetition_penalty": None}
    assert model.generate(**given, **on, custom_generate=ours).equal(model.generate(**given, **on))
    scored = {**on, "return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    theirs, got = model.generate(**given, **scored), model.generate(**given, **scored, custom_generate=ours)
    for name in ("logits", "scores"):
        torch.testing.assert_close(torch.stack(getattr(got, name)), torch.stack(getattr(theirs, name)), rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError, match="generate_with takes no generation_config"):
        paged_attn.generate_with(generation_config="auto")


@pytest.mark.parametrize("length", [23, 41])
def test_a_criterion_of_length_takes_the_place_of_the_calls(length: int) -> None:
    assert assert_same(tiny(), prompts(), stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(length)])).shape[1] == length


def test_sampling_is_seeded_by_torch_and_of_the_same_distribution() -> None:
    model, given = tiny(), prompts((0,))
    keywords: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 9,
        "top_p": 0.8,
        "num_return_sequences": 300,
        "max_new_tokens": 1,
    }

    def drawn(seed: int, **more: Any) -> Tensor:
        torch.manual_seed(seed)
        return model.generate(**given, **{**keywords, **more})[:, -1]

    ours = drawn(0, custom_generate=OURS)
    assert ours.equal(drawn(0, custom_generate=OURS)) and not ours.equal(drawn(1, custom_generate=OURS))
    theirs = drawn(0, num_return_sequences=3000)
    shares = [tokens.bincount(minlength=96) / len(tokens) for tokens in (ours, theirs)]
    assert ((shares[0] > 0) <= (shares[1] > 0)).all()
    torch.testing.assert_close(shares[0], shares[1], atol=0.1, rtol=0)
    assert len(set(ours.tolist())) > 1
    typical = drawn(0, custom_generate=OURS, typical_p=0.5)
    assert set(typical.tolist()) <= set(drawn(0, num_return_sequences=3000, typical_p=0.5).tolist())


def test_sampling_with_one_choice_is_greedy() -> None:
    assert_same(tiny(), prompts(), do_sample=True, top_k=1, num_return_sequences=3)


def test_filters_run_on_the_device_where_the_sampler_has_them_in_that_order() -> None:
    warm, top_k, typical = TemperatureLogitsWarper(0.5), TopKLogitsWarper(7), TypicalLogitsWarper(0.9)
    assert settings_of([warm, top_k], True, [0]) == ({"temperature": 0.5, "top_k": 7}, [])
    assert settings_of([typical, warm, top_k], True, [0]) == ({"temperature": 0.5, "top_k": 7}, [typical])
    assert settings_of([warm, typical, top_k], True, [0]) == ({"temperature": 1.0, "top_k": 7}, [warm, typical])
    assert settings_of([top_k, warm], True, [0]) == ({"temperature": 0.5}, [top_k])
    assert settings_of([TopKLogitsWarper(7, filter_value=-9.0)], True, [0])[0] == {"temperature": 1.0}
    assert settings_of([warm], False, [0]) == ({}, [warm])


class Column(LogitsProcessor):
    """Adds to the token that the length of the row names, and notes what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen += [tuple(row) for row in input_ids.tolist()]
        scores = scores.clone()
        scores[:, input_ids.shape[1] % 96] += 3.0
        return scores


def test_logits_processors_see_rows_as_they_are_in_the_batch() -> None:
    model, given, noted = tiny(), prompts(), [Column(), Column()]
    theirs, ours = (
        model.generate(**given, max_new_tokens=5, do_sample=False, logits_processor=LogitsProcessorList([note]), **more)
        for note, more in zip(noted, ({}, {"custom_generate": OURS}), strict=True)
    )
    assert ours.equal(theirs)
    assert sorted(noted[0].seen) == sorted(noted[1].seen)


def test_allowed_tokens_by_row() -> None:
    allowed = lambda row, ids: [10 + row, 20 + row, 30 + len(ids)]  # noqa: E731
    assert_same(tiny(), prompts(), prefix_allowed_tokens_fn=allowed)


def test_guidance_of_one_row() -> None:
    assert_same(tiny(), prompts((0,)), guidance_scale=1.5, max_new_tokens=4)
    with pytest.raises(UnsupportedError, match="UnbatchedClassifierFreeGuidanceLogitsProcessor goes through a batch row by row"):
        tiny().generate(**prompts(), guidance_scale=1.5, custom_generate=OURS)


class Third(StoppingCriteria):
    """Ends the rows whose last token divides by three; notes the batches."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.seen.append(input_ids)
        return input_ids[:, -1] % 3 == 0


@pytest.mark.parametrize("ends", [True, False], ids=["pads", "goes on"])
def test_stopping_criteria_see_the_batch(ends: bool) -> None:
    model, given, noted = tiny(), prompts(), [Third(), Third()]
    more: dict[str, Any] = {"eos_token_id": 95, "pad_token_id": 1} if ends else {}
    theirs, ours = (
        model.generate(**given, max_new_tokens=NEW, do_sample=False, stopping_criteria=StoppingCriteriaList([note]), **more, **custom)
        for note, custom in zip(noted, ({}, {"custom_generate": OURS}), strict=True)
    )
    assert ours.equal(theirs)
    assert len(noted[0].seen) == len(noted[1].seen)
    assert all(one.equal(other) for one, other in zip(noted[0].seen, noted[1].seen, strict=True))


def test_a_stop_string_and_the_time() -> None:
    model, given, spelled = tiny(), prompts(), tokenizer()
    text = spelled.decode(model.generate(**given, max_new_tokens=NEW, do_sample=False)[0, 22:24])
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer=spelled, stop_strings=[text])])
    got = assert_same(model, given, stopping_criteria=criteria, eos_token_id=95, pad_token_id=0)
    assert got[0, -1] == 0 or got.shape[1] < 19 + NEW
    assert model.generate(**given, max_new_tokens=200, max_time=0.0, custom_generate=OURS).shape[1] == 20


class Noting(BaseStreamer):
    def __init__(self) -> None:
        self.put_there: list[Tensor] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu" and not self.ended
        self.put_there.append(value.clone())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("paddings", [(0,), (0, 6, 13)])
def test_streamers(paddings: tuple[int, ...]) -> None:
    model, given = tiny(), prompts(paddings)
    streams = [Noting(), Noting()]
    more = {"eos_token_id": end_of(model, given, 0, 4), "pad_token_id": 1}
    theirs = model.generate(**given, max_new_tokens=9, do_sample=False, streamer=streams[0], **more)
    ours = model.generate(**given, max_new_tokens=9, do_sample=False, streamer=streams[1], **more, custom_generate=OURS)
    assert ours.equal(theirs)
    assert [s.ended for s in streams] == [1, 1]
    assert [v.tolist() for v in streams[0].put_there] == [v.tolist() for v in streams[1].put_there]


@pytest.mark.parametrize("sampled", [False, True])
def test_scores_and_logits(sampled: bool) -> None:
    model, given = tiny(), prompts()
    more: dict[str, Any] = {"do_sample": True, "top_k": 1, "temperature": 0.7} if sampled else {"repetition_penalty": 1.3}
    more |= {"eos_token_id": end_of(model, given, 1, 3), "pad_token_id": 1}
    theirs, ours = both(model, given, output_scores=True, output_logits=True, return_dict_in_generate=True, **more)
    assert isinstance(ours, GenerateDecoderOnlyOutput) and ours.sequences.equal(theirs.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(ours[name], theirs[name], atol=2e-5, rtol=1e-4)
    scores = [model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True) for out in (theirs, ours)]
    torch.testing.assert_close(*scores, atol=2e-5, rtol=1e-4)


def test_the_output_type() -> None:
    theirs, ours = both(tiny(), prompts(), return_dict_in_generate=True)
    assert isinstance(ours, GenerateDecoderOnlyOutput) and ours.sequences.equal(theirs.sequences)
    assert ours.scores is None and ours.logits is None and ours.past_key_values is None


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"num_beams": 2}, "does no beam search; model.generate.*PagedCache"),
        ({"num_beams": 2, "do_sample": True}, "does no beam sample"),
        ({"prompt_lookup_num_tokens": 3}, "does no assisted generation"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"token_type_ids": torch.zeros(3, 19, dtype=torch.int64)}, "token_type_ids: paged_attn.generate takes only token ids"),
        ({"position_ids": torch.arange(5, 24).expand(3, 19)}, "position_ids other than 0, 1, 2"),
        ({"attention_mask": torch.ones(3, 19, dtype=torch.int64).tril(12)}, "a 0 behind a 1"),
        ({"past_key_values": DynamicCache()}, "paged_attn.generate keeps keys and values"),
        ({"synced_gpus": True}, "synced_gpus"),
        (
            {"output_scores": True, "return_dict_in_generate": True, "max_time": 9.0},
            "of a batch with MaxTime",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_an_engine_does_not_do_is_refused(keywords: dict[str, Any], words: str) -> None:
    model = tiny("gpt2")
    with pytest.raises(UnsupportedError, match=words):
        model.generate(**{**prompts(), "custom_generate": OURS, **keywords})


def test_an_assistant_is_refused_and_a_bare_call() -> None:
    model = tiny()
    with pytest.raises(UnsupportedError, match="does no assisted generation"):
        model.generate(**prompts((0,)), assistant_model=build("llama"), custom_generate=OURS)
    with pytest.raises(TypeError, match=r"call model.generate\(..., custom_generate=paged_attn.generate\)"):
        paged_attn.generate(model, prompts()["input_ids"], None, None, None)
    with pytest.raises(TypeError, match=r"to run prompts directly, use paged_attn.LLM"):
        paged_attn.generate(model, ["Hello"])  # type: ignore[arg-type]
    misused: Any = ((("Hello",), {"max_tokens": 3}), ((["Hello"], paged_attn.SamplingParams()), {}), ((), {"prompts": "Hello"}), ((), {}))
    for given, settings in misused:
        with pytest.raises(TypeError, match=r"paged_attn.generate is for transformers: .* paged_attn.LLM\(model"):
            paged_attn.generate(*given, **settings)
    with pytest.raises(TypeError, match=r"generate_with\(\.\.\.\), with its brackets"):
        model.generate(**prompts((0,)), custom_generate=paged_attn.generate_with)
    assert paged_attn.engine_of("no model") is None  # type: ignore[arg-type]


def test_a_processor_that_generates_with_the_same_engine_is_told_so() -> None:
    model = tiny()

    def asks(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        model.generate(ids, max_new_tokens=1, custom_generate=OURS)
        return scores

    with pytest.raises(ValueError, match=r"the logits processor <function .*asks.* raised RuntimeError: a logits processor or a callback"):
        model.generate(**prompts((0,)), logits_processor=[asks], max_new_tokens=3, custom_generate=OURS)
    theirs, ours = both(model, prompts())
    assert ours.equal(theirs)


def test_the_models_last_position() -> None:
    model, given = tiny(), prompts((0, 3), length=250)
    with pytest.warns(UserWarning, match="ended after 7 new tokens, where the model's 256 positions end; 20 were asked for"):
        ours = model.generate(**given, max_new_tokens=20, do_sample=False, custom_generate=OURS)
    assert ours.equal(model.generate(**given, max_new_tokens=7, do_sample=False))


@pytest.mark.slow
def test_one_engine_is_kept_with_a_model_and_goes_with_it() -> None:
    model, given = build("llama", tie_word_embeddings=False), prompts((0,))
    assert paged_attn.engine_of(model) is None
    model.generate(**given, max_new_tokens=2, custom_generate=paged_attn.generate_with(**SETTINGS))
    first = paged_attn.engine_of(model)
    assert isinstance(first, LLM)
    model.generate(**given, max_new_tokens=2, custom_generate=OURS)
    assert paged_attn.engine_of(model) is first
    copied = copy.deepcopy(model)
    assert paged_attn.engine_of(copied) is None and paged_attn.engine_of(copy.copy(model)) is None
    assert paged_attn.engine_of(pickle.loads(pickle.dumps(model))) is None
    model.generate(**given, max_new_tokens=2, custom_generate=paged_attn.generate_with(num_pages=64))
    assert paged_attn.engine_of(model) is not first and first.closed
    second = weakref.ref(paged_attn.engine_of(model))
    paged_attn.engine_of(model).close()
    assert paged_attn.engine_of(model) is None
    assert_same(model, given, max_new_tokens=3)
    gone = weakref.ref(model)
    del model, first
    gc.collect()
    assert gone() is None and second() is None


@pytest.mark.slow
def test_a_model_that_changes_is_followed() -> None:
    model, given = build("llama", tie_word_embeddings=False), prompts()
    before = assert_same(model, given)
    engine = paged_attn.engine_of(model)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    written = assert_same(model, given)
    assert not written.equal(before) and paged_attn.engine_of(model) is engine
    model.lm_head = torch.nn.Linear(32, 96, bias=False)
    assert not assert_same(model, given).equal(written)
    assert paged_attn.engine_of(model) is not engine
