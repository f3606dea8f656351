"""What the model says of a layer against what was proved: a disagreement is an error, also where the graph has no mask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.prove.config_claims import check_declared
from paged_attn.passes.prove.mask_family import MaskFamily
from tests import tiny_models
from tests.passes.graphs import Toy, rewrite_of

CAUSAL, WINDOW, CHUNK = MaskFamily(True), MaskFamily(True, window=8), MaskFamily(True, chunk=8)


def model_with(config: dict[str, Any] | None, **layer: Any) -> nn.Module:
    model = nn.Module()
    model.attn = nn.Module()
    for name, value in layer.items():
        setattr(model.attn, name, value)
    if config is not None:
        model.config = SimpleNamespace(**config)
    return model


TYPES = {"layer_types": ["full_attention", "sliding_attention", "chunked_attention"], "sliding_window": 8, "attention_chunk_size": 8}


@pytest.mark.parametrize(
    ("config", "layer", "family"),
    [
        (TYPES, {"layer_idx": 0}, CAUSAL), (TYPES, {"layer_idx": 1}, WINDOW), (TYPES, {"layer_idx": 2}, CHUNK),
        (TYPES, {"layer_idx": 1, "sliding_window": 5}, MaskFamily(True, window=5)),
        ({"sliding_window": 8}, {}, WINDOW), ({"sliding_window": None}, {}, CAUSAL), ({}, {"sliding_window": 8}, WINDOW),
        ({"sliding_window": 8, "use_sliding_window": False}, {}, CAUSAL), ({"sliding_window": 8, "use_sliding_window": True}, {}, WINDOW),
        ({"layer_types": ["full_attention", "linear_attention"], "sliding_window": 8}, {"layer_idx": 0}, WINDOW),
        ({"sliding_window": 256, "max_position_embeddings": 256}, {}, CAUSAL),  # it never hides anything
        ({}, {"is_causal": True}, CAUSAL), ({}, {"is_causal": False}, MaskFamily(False)),
    ],
)  # fmt: skip
def test_agreement(config: dict[str, Any], layer: dict[str, Any], family: MaskFamily) -> None:
    assert check_declared(model_with(config, **layer), "attn", family, True)


@pytest.mark.parametrize(
    ("config", "layer", "family", "words"),
    [
        (TYPES, {"layer_idx": 0}, WINDOW, r"sliding window 8, but the model declares sliding window None \(layer type full_attention\)"),
        ({"layer_types": ["full_attention"], "sliding_window": None}, {"layer_idx": 0}, WINDOW, "declares sliding window None"),
        (TYPES, {"layer_idx": 0}, CHUNK, r"chunk 8, but the model declares chunk None"),
        (TYPES, {"layer_idx": 1}, CAUSAL, r"sliding window None, but the model declares sliding window 8 \(layer type sliding_attention\)"),
        (TYPES, {"layer_idx": 1}, MaskFamily(True, window=9), "sliding window 9, but the model declares sliding window 8"),
        (TYPES, {"layer_idx": 2}, CAUSAL, "chunk None, but the model declares chunk 8"),
        ({"sliding_window": 8}, {}, CAUSAL, "sliding window None, but the model declares sliding window 8"),
        ({"sliding_window": 8, "use_sliding_window": True}, {}, CAUSAL, "declares sliding window 8"),
        ({}, {"is_causal": True}, MaskFamily(False), "causal False, but the model declares causal True"),
    ],
)
def test_disagreement(config: dict[str, Any], layer: dict[str, Any], family: MaskFamily, words: str) -> None:
    with pytest.raises(UnsupportedError, match=f"layer at attn: .*{words}"):
        check_declared(model_with(config, **layer), "attn", family, True)


def test_an_absent_mask_is_named_as_the_cause() -> None:
    with pytest.raises(UnsupportedError, match="the graph has no mask, which proves nothing by itself"):
        check_declared(model_with({"sliding_window": 8}), "attn", CAUSAL, False)
    with pytest.raises(UnsupportedError) as caught:
        check_declared(model_with({"sliding_window": 8}), "attn", CAUSAL, True)
    assert "no mask" not in str(caught.value)


def test_the_words_for_explain() -> None:
    assert check_declared(None, "attn", CAUSAL, True) == "the model declares nothing"
    assert check_declared(model_with(None), "attn", CAUSAL, True) == "the model declares nothing"
    assert check_declared(model_with({}), "attn", CAUSAL, True) == "the config says nothing of this layer"
    said = check_declared(model_with(TYPES, layer_idx=2, is_causal=True), "attn", CHUNK, True)
    assert said == "agrees with the config: sliding window None, chunk 8, causal True"


def test_the_text_config_of_a_multimodal_model_counts() -> None:
    text = SimpleNamespace(sliding_window=8)
    model = model_with({"get_text_config": lambda: text, "sliding_window": None})
    with pytest.raises(UnsupportedError, match="declares sliding window 8"):
        check_declared(model, "attn", CAUSAL, True)


def causal_toy(**config: Any) -> Toy:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    toy = Toy(attend)
    toy.config = SimpleNamespace(**config)
    return toy


def test_is_causal_alone_does_not_pass_for_a_windowed_model() -> None:
    toy = causal_toy(sliding_window=8)
    with pytest.raises(UnsupportedError, match=r"no mask, which proves nothing by itself\), but the model declares sliding window 8"):
        rewrite_of(toy, toy)
    toy = causal_toy(sliding_window=8, use_sliding_window=False)
    assert rewrite_of(toy, toy).specs[0].sliding_window is None


def test_a_config_that_was_changed_behind_the_model_is_noticed() -> None:
    model, other = (tiny_models.build("gemma3_text", num_hidden_layers=2) for _ in range(2))
    other.config.layer_types = list(reversed(other.config.layer_types))
    with pytest.raises(UnsupportedError, match=r"layer at model\.layers\.0\.self_attn: .*but the model declares sliding window None"):
        rewrite_of(model, other, vocabulary=tiny_models.VOCAB, use_cache=False)
