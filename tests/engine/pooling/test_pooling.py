"""Embeddings and classes of ragged batches equal the model's own calls, one text alone, in float32."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModel

from paged_attn import LLM, SamplingParams, UnsupportedError
from tests.engine.models import fail_once, random_prompts
from tests.engine.pooling.models import CONFIGS, SETTINGS, classifier, classifying_llm, embedder, embedding_llm, own_embedding, own_logits
from tests.recurrent_models import recurrent

EDGES = [[token + 1 for token in prompt] for prompt in random_prompts(7, 1, 3, 4, 5, 8, 31, 32, 17)]  # of pages of 4 and steps of 32
TOLERANCE = {"atol": 1e-5, "rtol": 0.0}
SLOW = pytest.mark.slow


def _some(*quick: str) -> list[object]:
    return [pytest.param(name, marks=() if name in quick else SLOW) for name in CONFIGS]


@pytest.mark.parametrize("name", _some("qwen3", "bert"))
def test_an_embedding_is_that_of_the_model_itself(name: str) -> None:
    model = embedder(name)
    llm = embedding_llm(name)
    llm.clear_prefix_cache()
    prompts = [*EDGES]
    if llm.engine.is_causal:  # over several steps, and with a prefix in common
        (long,) = random_prompts(8, 70)
        prompts += [[t + 1 for t in long], [t + 1 for t in long[:50]] + [9] * 7]
    for pooling in ("last", "mean", "cls"):
        for _ in range(2):  # the second time with what the first one left in the prefix cache
            outputs = llm.embed(prompts, pooling=pooling, normalize=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                expected = own_embedding(model, prompt, pooling)
                torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, **TOLERANCE)
        cached = sum(output.cached_tokens for output in outputs)
        assert (cached > 0) == (llm.engine.is_causal and pooling == "last"), "hidden states of cached prefixes are not there"
    assert not llm.engine.requests and llm.engine.kv.num_available == llm.engine.kv.num_usable


def test_a_window_in_both_directions_that_is_longer_than_the_prompts_of_the_self_check() -> None:
    """A trace of more tokens than the window holds takes no fewer, and what would fill a short prompt up is seen by all of it."""
    torch.manual_seed(1)
    settings = {**CONFIGS["modernbert"], "local_attention": 64, "num_hidden_layers": 2, "global_attn_every_n_layers": 2}
    model = AutoModel.from_config(AutoConfig.for_model("modernbert", **settings)).eval()
    prompts = [[2 + token for token in range(length)] for length in (3, 70)]
    with LLM(model, task="embed", **{**SETTINGS, "max_batch_tokens": 80}) as llm:
        for prompt, output in zip(prompts, llm.embed(prompts, normalize=False), strict=True):
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), own_embedding(model, prompt, "mean"), **TOLERANCE)


@pytest.mark.parametrize("name", _some("llama", "bert"))
def test_classes_are_those_of_the_model_itself(name: str) -> None:
    model = classifier(name)
    for _ in range(2):
        for prompt, output in zip(EDGES, classifying_llm(name).classify(EDGES), strict=True):
            expected = own_logits(model, prompt)
            torch.testing.assert_close(torch.tensor(output.outputs.logits), expected, **TOLERANCE)
            torch.testing.assert_close(torch.tensor(output.outputs.probs), expected.softmax(-1), **TOLERANCE)


def test_a_classifier_with_another_head_or_another_body_and_under_autocast() -> None:
    model = copy.deepcopy(classifier("qwen3"))
    body = model.model
    with LLM(model, **SETTINGS) as llm:
        model.score = torch.nn.Linear(body.config.hidden_size, 3, bias=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = llm.classify(EDGES)
        for prompt, output in zip(EDGES, outputs, strict=True):
            torch.testing.assert_close(torch.tensor(output.outputs.logits), own_logits(model, prompt), **TOLERANCE)
        model.model = copy.deepcopy(body)
        with pytest.raises(UnsupportedError, match="its base_model was replaced, and the engine goes on with what was there before"):
            llm.classify(EDGES[:1])
        model.model = body
        assert llm.classify(EDGES[:1])[0].outputs.logits == pytest.approx(outputs[0].outputs.logits, abs=1e-5)


@pytest.mark.slow
def test_preempted_texts_give_the_same_mean() -> None:
    """A pool that holds no two of them whole: parts of a mean are computed again."""
    model = embedder("qwen3")
    prompts = [[token + 1 for token in prompt] for prompt in random_prompts(9, 50, 60, 55)]
    with LLM(model, task="embed", page_size=4, num_pages=18, max_batch_tokens=24) as llm:
        engine = llm.engine
        requests = [engine.add_request(prompt, engine.pooler.params(True, "mean")) for prompt in prompts]
        engine.step()
        for request in list(engine.scheduler.running.from_last()):
            engine.scheduler.preempt(request)
        while engine.has_work:
            engine.step()
        for prompt, request in zip(prompts, requests, strict=True):
            torch.testing.assert_close(request.pooled_row(), own_embedding(model, prompt, "mean"), **TOLERANCE)


def test_a_text_that_a_failed_step_left_is_still_computed_whole() -> None:
    """Another one is more urgent by then, and there is no room for both."""
    model = embedder("bert")
    texts = [[token + 1 for token in text] for text in random_prompts(3, 20, 24)]
    with LLM(model, task="embed", page_size=4, num_pages=64, max_batch_tokens=32, overlap=False) as llm:
        engine = llm.engine
        params = engine.pooler.params(False, "mean")
        first = engine.add_request(texts[0], params)
        fail_once(engine, RuntimeError("once"))
        with pytest.raises(RuntimeError, match="once"):
            engine.step()
        second = engine.add_request(texts[1], params, priority=-1)
        while engine.has_work:
            engine.step()
        for text, request in zip(texts, (first, second), strict=True):
            torch.testing.assert_close(request.pooled_row(), own_embedding(model, text, "mean"), **TOLERANCE)


def test_normalized_unless_asked_otherwise_and_cut_before_it() -> None:
    llm, prompt = embedding_llm("qwen3"), EDGES[4]
    plain = own_embedding(embedder("qwen3"), prompt, "last")
    for dimensions in (None, 8):
        (output,) = llm.embed(prompt, dimensions=dimensions)
        expected = torch.nn.functional.normalize(plain[:dimensions], dim=-1)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, **TOLERANCE)
    for wrong in (0, 33, True):
        with pytest.raises(ValueError, match=r"dimensions: got .*; allowed: 1 to 32"):
            llm.embed(prompt, dimensions=wrong)
    with pytest.raises(ValueError, match="pooling: got 'max'; allowed: 'last', 'mean', 'cls'"):
        llm.embed(prompt, pooling="max")  # type: ignore[arg-type]


def test_what_a_model_is_not_for_is_said() -> None:
    encoder = embedding_llm("bert")
    with pytest.raises(UnsupportedError, match=r"BertModel embeds texts \(llm.embed\) and continues none"):
        encoder.generate([[5]], SamplingParams(max_new_tokens=1))
    with pytest.raises(UnsupportedError, match="classify is not for this LLM of BertModel: it embeds"):
        encoder.classify([[5]])
    with pytest.raises(UnsupportedError, match="the prompt has 33 tokens; the model reads a text in both directions"):
        encoder.embed([[5] * 33])
    with pytest.raises(ValueError, match="task: got 'rank'; allowed: 'auto', 'generate', 'embed', 'classify'"):
        LLM(embedder("bert"), task="rank")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="runs traced alone; leave compile=False out"):
        LLM(embedder("bert"), compile=False, **SETTINGS)


@pytest.mark.slow
def test_padding_is_refused_where_the_model_would_not_count_it() -> None:
    with pytest.raises(ValueError, match="ends with the padding token 0"):
        classifying_llm("qwen3").classify([[5, 0]])
    with pytest.raises(ValueError, match="holds the padding token 1"):
        embedding_llm("roberta").embed([[5, 1, 7]])


@pytest.mark.slow
def test_hidden_states_that_are_not_finite_end_one_text_alone() -> None:
    model = _with_nan_token()
    with LLM(model, task="embed", self_check=False, **SETTINGS) as llm:
        engine = llm.engine
        requests = [engine.add_request([5, token, 6], engine.pooler.params(True, "mean")) for token in (7, 90)]
        while engine.has_work:
            engine.step()
        assert requests[0].error is None and "NaN" in str(requests[1].error)
        with pytest.raises(ValueError, match="NaN"):
            llm.embed([[5, 90, 6]])


def _with_nan_token() -> torch.nn.Module:
    model = copy.deepcopy(embedder("qwen3"))
    with torch.no_grad():
        model.get_input_embeddings().weight[90] = float("nan")
    return model  # type: ignore[no-any-return]


def test_adapters_by_request_are_for_models_that_generate() -> None:
    with pytest.raises(UnsupportedError, match=r"max_loras=2: Qwen3Model embeds or classifies.*merge_and_unload"):
        LLM(embedder("qwen3"), task="embed", max_loras=2, **SETTINGS)


def test_models_with_recurrent_state_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"Lfm2Model keeps recurrent state in layers\.0.*, and an engine that embeds or classifies"):
        LLM(recurrent("lfm2"), task="embed", num_pages=20)
