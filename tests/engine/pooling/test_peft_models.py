"""Models of peft, and what torch.compile returned, embed and classify as their own call does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from paged_attn import LLM, UnsupportedError
from paged_attn.engine.runners.model_watch import ModelChangedError
from tests.engine.pooling.models import SETTINGS, classifier, embedder, own_embedding, own_logits
from tests.tiny_models import build_short

peft = pytest.importorskip("peft")
TEXTS = [[5, 9, 2, 33, 17, 4, 7], [7, 8, 9]]
TOLERANCE = {"atol": 1e-5, "rtol": 0.0}


def adapted(model: Any, task: str | None, **settings: Any) -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task, init_lora_weights=False, **settings)
    return peft.get_peft_model(copy.deepcopy(model), config).eval()


@pytest.mark.parametrize("task", ["SEQ_CLS", None])
def test_a_classifier(task: str | None) -> None:
    model = adapted(classifier("llama"), task, modules_to_save=["score"])
    with torch.no_grad():
        model.base_model.model.score.weight.mul_(-2)
    with LLM(model, **SETTINGS) as llm:
        for text, output in zip(TEXTS, llm.classify(TEXTS), strict=True):
            torch.testing.assert_close(torch.tensor(output.outputs.logits), own_logits(model, text), **TOLERANCE)
        with model.disable_adapter(), pytest.raises(ModelChangedError):
            llm.classify(TEXTS)


def test_a_model_with_a_head_that_embeds() -> None:
    model = adapted(build_short("qwen3"), "CAUSAL_LM")
    with LLM(model, task="embed", **SETTINGS) as llm:
        for text, output in zip(TEXTS, llm.embed(TEXTS, normalize=False), strict=True):
            expected = own_embedding(model.base_model.model.model, text, "last")
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, **TOLERANCE)


def test_a_learned_prompt_is_refused() -> None:
    config = peft.PromptTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=4)
    model = peft.get_peft_model(copy.deepcopy(embedder("qwen3")), config).eval()
    with pytest.raises(UnsupportedError, match="peft's own call of PeftModelForFeatureExtraction gives other values than the Qwen3Model"):
        LLM(model, task="embed", **SETTINGS)


def test_a_compiled_classifier() -> None:
    with LLM(torch.compile(classifier("bert")), **SETTINGS) as llm:
        (output,) = llm.classify(TEXTS[:1])
    torch.testing.assert_close(torch.tensor(output.outputs.logits), own_logits(classifier("bert"), TEXTS[0]), **TOLERANCE)
