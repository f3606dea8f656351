"""The name of a call's cache: `past_key_values` (or `cache_params`) up to transformers 5.23, `cache` since; both are accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
CACHE_NAME = "cache" if any(field.name == "cache" for field in fields(CausalLMOutputWithPast)) else "past_key_values"


def given_cache(inputs: Mapping[str, Any]) -> Any:
    """The cache among a call's keywords; None without one."""
    return next((inputs[name] for name in CACHE_NAMES if inputs.get(name) is not None), None)


def without_cache(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call other than its cache."""
    return {name: value for name, value in inputs.items() if name not in CACHE_NAMES}


def output_with_cache(logits: Any, cache: Any) -> CausalLMOutputWithPast:
    """The output of a causal language model."""
    kept: dict[str, Any] = {CACHE_NAME: cache}
    return CausalLMOutputWithPast(logits=logits, **kept)
