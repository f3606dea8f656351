"""Embeddings, classes and scores as people ask for them: vLLM's methods, OpenAI's route and client, folders of sentence-transformers,
cross-encoders, Jina's and Cohere's rerank."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast

import paged_attn
from paged_attn import LLM, AsyncLLM, UnsupportedError
from tests.engine.models import tokenizer
from tests.engine.pooling.models import SETTINGS, classifier, embedder, own_embedding, own_logits
from tests.server.serving import Running, serving

DEMO = Path(paged_attn.__file__).parent / "demo_model"
TEXTS = ["It was a dark night", "She had never", "A", "It was a dark night, and she had never seen it so dark. " * 3]
JSON = {"Content-Type": "application/json"}
TOLERANCE = {"atol": 1e-5, "rtol": 0.0}


@pytest.fixture(scope="module")
def body() -> Any:
    return AutoModel.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO, task="embed", device="cpu", dtype=torch.float32, num_pages=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    with serving(lambda: llm.engine, model_name="demo_model") as running:
        yield running


def unit(body: Any, text: str, pooling: str = "last") -> Tensor:
    ids = AutoTokenizer.from_pretrained(DEMO)(text).input_ids
    return torch.nn.functional.normalize(own_embedding(body, ids, pooling), dim=-1)


def close(got: Any, expected: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(got, dtype=torch.float32), expected, **TOLERANCE)


def test_embed_as_vllm_has_it(llm: LLM, body: Any) -> None:
    for text, output in zip(TEXTS, llm.embed(TEXTS), strict=True):
        close(output.outputs.embedding, unit(body, text))
    (output,) = llm.embed("She had", pooling="mean")
    close(output.outputs.embedding, unit(body, "She had", "mean"))
    (output,) = llm.score("She had", "It was")
    assert output.outputs.score == pytest.approx(float(unit(body, "She had") @ unit(body, "It was")), abs=1e-5)


def test_openais_client_embeds(server: Running, body: Any) -> None:
    """The client asks for base64 unless it is told otherwise."""
    answer = server.client.embeddings.create(model="demo_model", input=TEXTS)
    assert [each.index for each in answer.data] == list(range(len(TEXTS))) and answer.model == "demo_model"
    for text, each in zip(TEXTS, answer.data, strict=True):
        close(each.embedding, unit(body, text))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, TEXTS)), "the package's model reads bytes"
    ids = AutoTokenizer.from_pretrained(DEMO)(TEXTS[0]).input_ids
    for form in (TEXTS[0], ids, [ids]):
        (each,) = server.client.embeddings.create(model="demo_model", input=form, encoding_format="float").data
        close(each.embedding, unit(body, TEXTS[0]))


def test_dimensions_and_forms_of_numbers(server: Running, body: Any) -> None:
    raw = server.http.post("/v1/embeddings", json={"input": "She", "encoding_format": "base64", "dimensions": 16, "pooling": "mean"}).json()
    values = torch.frombuffer(bytearray(base64.b64decode(raw["data"][0]["embedding"])), dtype=torch.float32)
    close(values, torch.nn.functional.normalize(own_embedding(body, list(b"She"), "mean")[:16], dim=-1))
    refused = server.http.post("/v1/embeddings", json={"input": "She", "dimensions": 100_000})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "dimensions"
    for wrong in ("", [], {"text": "She"}, None):
        refused = server.http.post("/v1/embeddings", json={"input": wrong})
        assert refused.status_code == 400 and "prompt" not in refused.json()["error"]["message"].split(" ")[0], refused.text


def test_a_server_says_what_it_is_not_for(server: Running) -> None:
    refused = server.http.post("/v1/completions", json={"prompt": "She"})
    assert refused.status_code == 400 and "continues no text; it has /v1/embeddings" in refused.json()["error"]["message"]
    assert server.http.post("/v1/embeddings", json={"input": "She", "model": "another"}).status_code == 404
    server.wait_idle()


def test_rerank_by_embeddings(server: Running, body: Any) -> None:
    asked = {"query": "She had", "documents": [*TEXTS[:2], {"text": "A"}], "top_n": 2}
    answer, *others = (server.http.post(path, json=asked).json() for path in ("/v1/rerank", "/rerank", "/v2/rerank"))
    assert [other["results"] for other in others] == [answer["results"]] * 2 and server.http.get("/ping").status_code == 200
    scores = [float(unit(body, "She had") @ unit(body, text)) for text in TEXTS[:3]]
    order = sorted(range(3), key=lambda i: -scores[i])[:2]
    assert [each["index"] for each in answer["results"]] == order
    assert [each["relevance_score"] for each in answer["results"]] == pytest.approx([scores[i] for i in order], abs=1e-5)
    assert answer["results"][0]["document"] == {"text": TEXTS[order[0]]}


def test_errors_of_scores_name_the_side_as_the_request_did(server: Running) -> None:
    bad = r'"\ud800"'
    for sides, param in ((f'"text_1": {bad}, "text_2": "a"', "text_1"), (f'"text_1": "a", "text_2": ["b", "a", {bad}]', "text_2")):
        refused = server.http.post("/v1/score", content=f"{{{sides}}}".encode(), headers=JSON)
        assert refused.json()["error"]["param"] == param and f"{param} holds half of a surrogate pair" in refused.text
    refused = server.http.post("/v1/rerank", content=f'{{"query": "a", "documents": ["b", {bad}]}}'.encode(), headers=JSON)
    assert refused.json()["error"]["param"] == "documents" and "documents holds half of a surrogate pair" in refused.text
    for body, param in (({"text_1": 3, "text_2": "a"}, "text_1"), ({"text_1": "a", "text_2": []}, "text_2")):
        refused = server.http.post("/v1/score", json=body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
        assert f"{param}: got {body[param]}; allowed: a text, or a list of texts" in refused.text


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BERT with one label, which tells the two texts apart by their token types."""
    folder = tmp_path_factory.mktemp("cross")
    classifier("bert", 1).save_pretrained(folder)
    joins = copy.deepcopy(tokenizer().backend_tokenizer)
    special = [("!", 2), ("#", 4)]
    joins.post_processor = TemplateProcessing(single="! $A #", pair="! $A # $B:1 #:1", special_tokens=special)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=joins, pad_token="<pad>", model_input_names=names).save_pretrained(folder)
    return folder


def test_a_cross_encoder_scores_and_ranks(cross_encoder: Path) -> None:
    model, own = classifier("bert", 1), AutoTokenizer.from_pretrained(cross_encoder)
    documents = ["a dark night", "never", "had it been so"]
    expected = []
    for text in documents:
        pair = own("She had", text)
        assert {0, 1} == set(pair.token_type_ids)
        expected.append(float(own_logits(model, pair.input_ids, token_type_ids=pair.token_type_ids).sigmoid()))
    assert len({round(value, 4) for value in expected}) == 3
    with LLM(cross_encoder, device="cpu", **SETTINGS) as llm:
        assert [o.outputs.score for o in llm.score("She had", documents)] == pytest.approx(expected, abs=1e-5)
        with pytest.raises(UnsupportedError, match="embed is not for this LLM of BertForSequenceClassification: it classifies"):
            llm.embed("She")
        with serving(lambda: llm.engine) as running:
            data = running.http.post("/score", json={"text_1": "She had", "text_2": documents}).json()["data"]
            assert [each["score"] for each in data] == pytest.approx(expected, abs=1e-5)
            results = running.http.post("/v1/rerank", json={"query": "She had", "documents": documents}).json()["results"]
            assert [each["relevance_score"] for each in results] == pytest.approx(sorted(expected, reverse=True), abs=1e-5)
            refused = running.http.post("/v1/score", json={"text_1": ["a", "b"], "text_2": ["c", "d", "e"]})
            assert (
                refused.status_code == 400
                and "text_2: got 3 texts beside 2 of text_1; allowed: as many" in refused.json()["error"]["message"]
            )
            refused = running.http.post("/v1/score", content=b'{"text_1": "a", "text_2": "\\ud800"}', headers=JSON)
            assert refused.json()["error"]["param"] == "text_2" and "text_2 holds half of a surrogate pair" in refused.text
            refused = running.http.post("/v1/score", json={"text_1": [], "text_2": "b"})
            assert "text_1: got []; allowed: a text, or a list of texts" in refused.text and refused.json()["error"]["param"] == "text_1"
            refused = running.http.post("/v1/rerank", json={"query": "", "documents": "b"})
            assert "documents: got 'b'; allowed: a list of texts" in refused.text
            refused = running.http.post("/v1/rerank", json={"query": "a", "documents": [{"text": "b", "title": "c"}]})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "documents" and "title" in refused.text
            refused = running.http.post("/v1/embeddings", json={"input": "She"})
            assert refused.status_code == 400 and "classifies and does not embed" in refused.json()["error"]["message"]
            running.wait_idle()


def test_token_types_that_the_model_does_not_read_count_for_nothing(cross_encoder: Path) -> None:
    """Tokenizers tell them whatever the model is; types that it does not have are refused where it reads them."""
    model, own = classifier("qwen3", 1), AutoTokenizer.from_pretrained(cross_encoder)
    pair = own("She had", "never")
    assert set(pair.token_type_ids) == {0, 1}
    with LLM(model, tokenizer=own, **SETTINGS) as llm:
        (output,) = llm.score("She had", "never")
        assert output.outputs.score == pytest.approx(float(own_logits(model, pair.input_ids).sigmoid()), abs=1e-5)
    own.backend_tokenizer.post_processor = TemplateProcessing(single="! $A #", pair="! $A # $B:2 #:1", special_tokens=[("!", 2), ("#", 4)])
    with LLM(classifier("bert", 1), tokenizer=own, **SETTINGS) as llm:
        with pytest.raises(ValueError, match="token_types: got 2; allowed: 0 to 1, the token types of this model"):
            llm.score("She had", "never")


def test_an_async_llm_does_so_too(cross_encoder: Path, body: Any) -> None:
    async def embeds() -> None:
        async with AsyncLLM(DEMO, task="embed", device="cpu", dtype=torch.float32, num_pages=256) as llm:
            several = await asyncio.gather(*(llm.embed(text) for text in TEXTS), llm.embed(TEXTS), llm.score("She had", "It was"))
            for text, (alone,), together in zip(TEXTS, several, several[-2], strict=False):
                close(alone.outputs.embedding, unit(body, text))
                close(together.outputs.embedding, unit(body, text))
            assert several[-1][0].outputs.score == pytest.approx(float(unit(body, "She had") @ unit(body, "It was")), abs=1e-5)
            with pytest.raises(UnsupportedError, match="classify is not for this LLM"):
                await llm.classify("She")
            with pytest.raises(ValueError, match="dimensions"):
                await llm.embed("She", dimensions=0)
            long = asyncio.ensure_future(llm.embed(["word " * 200] * 40))
            await asyncio.sleep(0.01)
            long.cancel()
            with pytest.raises(asyncio.CancelledError):
                await long
            close((await llm.embed(TEXTS[0]))[0].outputs.embedding, unit(body, TEXTS[0]))
            assert llm._limit.free == llm._limit.count

    async def scores() -> None:
        documents = ["a dark night", "never", "had it been so"]
        with LLM(cross_encoder, device="cpu", **SETTINGS) as llm:
            expected = [output.outputs.score for output in llm.score("She had", documents)]
        async with AsyncLLM(cross_encoder, device="cpu", **SETTINGS) as llm:
            assert [output.outputs.score for output in await llm.score("She had", documents)] == pytest.approx(expected, abs=1e-6)
            (output,) = await llm.classify("She had")
            assert len(output.outputs.probs) == 1

    asyncio.run(embeds())
    asyncio.run(scores())


def write_modules(folder: Path, kinds: list[str], pooling: dict[str, Any]) -> None:
    """As sentence-transformers writes them."""
    names = [(kind, "" if kind == "Transformer" else f"{index}_{kind}") for index, kind in enumerate(kinds)]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in names]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    ("name", "pooling", "mode", "normalize"),
    [
        ("bert", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls", True),
        pytest.param("qwen3", {"pooling_mode": "mean"}, "mean", False, marks=pytest.mark.slow),
    ],
)
def test_a_folder_of_sentence_transformers_says_how_it_embeds(
    name: str, pooling: dict[str, Any], mode: str, normalize: bool, tmp_path: Path
) -> None:
    model = embedder(name)
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    write_modules(tmp_path, ["Transformer", "Pooling", *["Normalize"] * normalize], pooling)
    with LLM(tmp_path, device="cpu", **SETTINGS) as llm:
        (output,) = llm.embed([[5, 7, 9]])
    expected = own_embedding(model, [5, 7, 9], mode)
    close(output.outputs.embedding, torch.nn.functional.normalize(expected, dim=-1) if normalize else expected)


@pytest.mark.parametrize(
    ("kinds", "pooling", "words"),
    [
        (["Transformer", "Pooling", "Dense"], {"pooling_mode": "mean"}, "its modules.json puts Dense behind the model"),
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "its pooling asks for max_tokens"),
    ],
)
def test_other_modules_are_refused(kinds: list[str], pooling: dict[str, Any], words: str, tmp_path: Path) -> None:
    embedder("bert").save_pretrained(tmp_path)
    write_modules(tmp_path, kinds, pooling)
    with pytest.raises(UnsupportedError, match=words):
        LLM(tmp_path, device="cpu")


def test_no_weights_are_made_up(tmp_path: Path) -> None:
    embedder("bert").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"holds BertModel and no weights of classifier\.bias: it is not a model that classifies"):
        LLM(tmp_path, task="classify", device="cpu")
