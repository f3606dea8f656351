"""Tiny models that embed or classify, and what their own calls say of one text alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from paged_attn import LLM
from tests.tiny_models import COMMON, VOCAB

SETTINGS: dict[str, Any] = {"page_size": 4, "num_pages": 96, "max_batch_tokens": 32}
ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 80, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
DISTIL: dict[str, Any] = {
    "vocab_size": VOCAB, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 80, "initializer_range": 0.3,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": COMMON, "llama": {**COMMON, "pad_token_id": None}, "bert": ENCODER, "roberta": {**ENCODER, "pad_token_id": 1},
    "xlm-roberta": {**ENCODER, "pad_token_id": 1, "type_vocab_size": 1}, "distilbert": DISTIL, "electra": {**ENCODER, "embedding_size": 32},
    "modernbert": {**ENCODER, "local_attention": 8, "global_attn_every_n_layers": 3, "num_hidden_layers": 3},
    "gemma3_text": {**COMMON, "use_bidirectional_attention": True, "sliding_window": 8, "sliding_window_pattern": 2},  # EmbeddingGemma's
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 80, "initializer_range": 0.3},
}  # fmt: skip


@functools.cache
def embedder(name: str) -> Any:
    return _seeded(AutoModel, name)


@functools.cache
def embedding_llm(name: str) -> LLM:
    """One for all tests: nothing of a text is left but its prefix."""
    return LLM(embedder(name), task="embed", **SETTINGS)


@functools.cache
def classifying_llm(name: str) -> LLM:
    return LLM(classifier(name), **SETTINGS)


@functools.cache
def classifier(name: str, labels: int = 3) -> Any:
    return _seeded(AutoModelForSequenceClassification, name, num_labels=labels)


def _seeded(auto: Any, name: str, **more: Any) -> Any:
    torch.manual_seed(1)
    return auto.from_config(AutoConfig.for_model(name, **CONFIGS[name], **more)).float().eval()


@torch.no_grad()
def own_embedding(model: Any, ids: Sequence[int], pooling: str) -> Tensor:
    """[W] in plain PyTorch, of the model's own call."""
    hidden = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0)}[pooling]


@torch.no_grad()
def own_logits(model: Any, ids: Sequence[int], **more: Any) -> Tensor:
    """[labels]"""
    logits: Tensor = model(input_ids=torch.tensor([ids]), **{name: torch.tensor([each]) for name, each in more.items()}).logits[0]
    return logits
