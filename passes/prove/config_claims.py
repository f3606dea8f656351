"""Compares what a config claims about layers (layer_types, sliding_window, attention_chunk_size, is_causal) with what was proved."""

from __future__ import annotations

from typing import Any

from torch import nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.fx.model_facts import text_config
from paged_attn.passes.prove.mask_family import MaskFamily


def check_declared(model: nn.Module | None, module: str, family: MaskFamily, has_mask: bool) -> str:
    """Compares one layer's proved family with what the model states about it; returns the result in words for `explain`.

    Raises:
        UnsupportedError: they disagree. This also catches a missing mask, since its absence alone proves nothing.
    """
    config = text_config(model)
    if model is None or config is None:
        return "the model declares nothing"
    layer = _submodule(model, module)
    kind = _layer_type(config, layer)
    statements = _statements(config, layer, kind, family)
    for what, proved, declared in statements:
        if proved != declared:
            absent = "" if has_mask else " (the graph has no mask, which proves nothing by itself)"
            raise UnsupportedError(
                f"layer at {module}: the graph's attention has {what} {proved}{absent}, but the model declares {what} {declared}"
                f"{f' (layer type {kind})' if kind else ''}. Trace it with batch.model_inputs() so that masks are built, "
                "or correct the config."
            )
    unused = "; its dual_chunk_attention_config is not what this model's code computes" * bool(_dual_chunk_sizes(config))
    if not statements:
        return "the config says nothing of this layer" + unused
    return "agrees with the config: " + ", ".join(f"{what} {declared}" for what, _, declared in statements) + unused


def check_declared_chunks(model: nn.Module | None, module: str, chunk: int) -> str:
    """`check_declared` for dual chunk attention, whose config.json is like Qwen2.5-1M's."""
    config = text_config(model)
    declared = _dual_chunk_sizes(config)
    if declared is None:
        return "the model declares nothing" if config is None else "the config says nothing of this layer"
    words = f"chunk_size {declared[0]} less local_size {declared[1]}"
    if declared[0] - declared[1] != chunk:
        raise UnsupportedError(
            f"layer at {module}: the graph's dual chunk attention has chunks of {chunk}, but the model declares {words}. "
            "Correct the config."
        )
    return f"agrees with the config: {words}"


def _dual_chunk_sizes(config: Any) -> tuple[int, int] | None:
    """chunk_size and local_size, if a config has them."""
    declared = getattr(config, "dual_chunk_attention_config", None)
    if not isinstance(declared, dict) or not {"chunk_size", "local_size"} <= declared.keys():
        return None
    return declared["chunk_size"], declared["local_size"]


def _statements(config: Any, layer: nn.Module | None, kind: str | None, family: MaskFamily) -> list[tuple[str, Any, Any]]:
    """(what, proved, declared) for each statement of the model; empty if it states nothing."""
    said: list[tuple[str, Any, Any]] = []
    window = _window(config, layer)
    # A model without sliding layers may apply its window to all layers that it calls full.
    no_kind_slides = "sliding_attention" not in (getattr(config, "layer_types", None) or ())
    if kind == "sliding_attention" or (kind == "full_attention" and no_kind_slides and family.window is not None):
        said.append(("sliding window", _that_bites(family.window, config), window))
    elif kind in ("full_attention", "chunked_attention"):
        chunk = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None
        said += [("sliding window", _that_bites(family.window, config), None), ("chunk", family.chunk, chunk)]
    elif kind is None and window is not None:
        said.append(("sliding window", _that_bites(family.window, config), window))
    if getattr(layer, "is_causal", None) is True:
        said.append(("causal", family.causal, True))
    return said


def _layer_type(config: Any, layer: nn.Module | None) -> str | None:
    types, index = getattr(config, "layer_types", None), getattr(layer, "layer_idx", None)
    return types[index] if types and isinstance(index, int) and index < len(types) else None


def _window(config: Any, layer: nn.Module | None) -> int | None:
    if getattr(config, "use_sliding_window", True) is False:
        return None
    window = getattr(layer, "sliding_window", None) or getattr(config, "sliding_window", None)
    if not isinstance(window, int):
        return None
    return _that_bites(window, config)


def _that_bites(window: int | None, config: Any) -> int | None:
    """A window, or None for one as long as the model's positions, which never hides anything."""
    longest = getattr(config, "max_position_embeddings", None)
    return None if window is not None and isinstance(longest, int) and window >= longest else window


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    module: Any = model
    for part in path.split(".") if path else []:
        module = getattr(module, part, None)
    return module if isinstance(module, nn.Module) else None
