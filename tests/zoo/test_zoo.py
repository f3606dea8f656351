"""A sample of the zoo, one type for each feature: the same tokens as the unmodified model, or a refusal that says why.

All types: `python -m tests.zoo --report`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.zoo.configs import TYPES
from tests.zoo.run_one import run

RUN = {
    "bert": "an encoder as a decoder, post-norm",
    "bloom": "ALiBi",
    "cohere2": "rotary and position-free layers",
    "dbrx": "experts whose rows lie in matrices",
    "deepseek_v3": "latent attention, unequal head dims, grouped experts",
    "diffllama": "attention in two halves",
    "gemma2": "softcaps and windows",
    "gpt2": "learned positions",
    "gpt_bigcode": "one KV head",
    "gpt_neo": "attention written out, unscaled, local layers",
    "gpt_oss": "sinks",
    "hrm_text": "layers that run several times, each with KV of its own",
    "jamba": "selective state, attention and experts",
    "laguna": "heads by layer",
    "lfm2": "short convolutions",
    "llama4_text": "chunks, temperature by position",
    "mamba2": "state alone",
    "openai-gpt": "hides by -1e4, which bfloat16 does not have",
    "qwen3_next": "gated delta rule",
    "qwen4_exp_text": "an indexer that branches on a mask, a state of integers",
    "recurrent_gemma": "state in attributes, and a forward that takes it token by token alone",
    "rwkv": "state that layers are given and give back, all of one tensor",
    "whisper": "positions of its own, no position_ids",
}
SLOW = {
    "axk2": "keys chosen by an indexer",
    "inkling_text": "learned relative biases, convolutions",
    "gemma4_text": "layers that share KV, head dims by layer",
}
REFUSED = {
    "roberta": "called without position_ids gives other logits",
}


@pytest.mark.parametrize("model_type", [*RUN, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_type_gives_the_tokens_of_the_unmodified_model(model_type: str) -> None:
    if model_type not in TYPES:
        pytest.skip(f"this transformers has no {model_type}")
    report = run(model_type)
    assert report["result"] == "ok", f"{report['result']}: {report['reason']}\n{report.get('words', '')}"
    assert report["bf16"]["result"] == "ok", report["bf16"]


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_next", {"norm_topk_prob": False}),  # one row of its logits that rounding moves further than most
    ("nemotron_h", {"head_dim": 16}),  # its two formulas of one layer differ by a hundredth
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
]


@pytest.mark.parametrize(("model_type", "changes"), VARIANTS)
def test_a_variant_that_was_refused_once(model_type: str, changes: dict[str, Any]) -> None:
    """Found by `python -m tests.zoo.variants`."""
    report = run(model_type, changes)
    assert report["result"] == "ok", f"{report['result']}: {report['reason']}\n{report.get('words', '')}"
    assert report["bf16"]["result"] == "ok", report["bf16"]


@pytest.mark.parametrize(("model_type", "words"), REFUSED.items())
def test_a_type_is_refused_for_its_reason(model_type: str, words: str) -> None:
    report = run(model_type)
    assert (report["result"], words in report["reason"]) == ("refused", True), f"{report['result']}: {report['reason']}"
