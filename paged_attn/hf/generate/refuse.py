"""Refuses what transformers' `generate` supports and an engine does not, before anything runs, and names an alternative."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.hf.cache_name import CACHE_NAMES

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
ON_PAGES = "model.generate(..., past_key_values=paged_attn.PagedCache(model)) does (docs/generate.md)"
_MORE_OUTPUTS = ("output_attentions", "output_hidden_states")  # transformers also ignores these unless a dictionary is returned
CALLED_BY_ITSELF = (
    "paged_attn.generate is for transformers: call model.generate(..., custom_generate=paged_attn.generate); to run prompts directly, "
    "use paged_attn.LLM(model, tokenizer=...).generate(prompts)"
)
# Arguments of `generate` that have no effect here (K and V are always in the engine's pages), or are read elsewhere.
_KNOWN = {"attention_mask", "position_ids", *CACHE_NAMES, "use_cache", "logits_to_keep"}


def says_something(value: Any) -> bool:
    """Whether a keyword has any effect; transformers passes an empty mapping to some models."""
    return value is not None and not (isinstance(value, Mapping) and not value)


def generate_frame(model: Any = None, around: FrameType | None = None) -> FrameType | None:
    """The innermost call of transformers' `generate` around us, or around the frame `around`; only calls of `model`, if given."""
    frame: FrameType | None = sys._getframe(1) if around is None else around.f_back
    while frame is not None and not (frame.f_code is _GENERATE and (model is None or frame.f_locals["self"] is model)):
        frame = frame.f_back
    return frame


def callers_keywords() -> dict[str, Any]:
    """`streamer`, `assistant_model` and `synced_gpus` of the call of `generate` that called us: it passes them only to its own loops.
    Raises TypeError: not called by `generate`."""
    frame = generate_frame()
    if frame is None:
        raise TypeError(CALLED_BY_ITSELF)
    return {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}


def refuse_others(model: Any, config: GenerationConfig, called: dict[str, Any], given: dict[str, Any]) -> None:
    """Raises UnsupportedError unless the call is greedy decoding or sampling of token ids.

    Args:
        called: see `callers_keywords`.
        given: the model's inputs other than its tokens.
    """
    mode = config.get_generation_mode(called["assistant_model"])
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UnsupportedError(f"paged_attn.generate decodes greedily or samples, and does no {mode.value.replace('_', ' ')}; {ON_PAGES}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{type(model).__name__} is an encoder-decoder, and paged_attn is for causal language models")
    if called["synced_gpus"]:
        raise UnsupportedError("synced_gpus: paged_attn.generate runs a model that lies whole on its device, without ZeRO or FSDP")
    if config.cache_implementation == "quantized":
        raise UnsupportedError("cache_implementation='quantized': paged_attn keeps keys and values in the model's dtype; leave it out")
    if "prepare_inputs_for_generation" in vars(model):
        raise UnsupportedError(
            f"the prepare_inputs_for_generation of this {type(model).__name__} was replaced, as peft does for prompts that it learned, and "
            "paged_attn.generate never calls it; leave custom_generate out"
        )
    more = [name for name in _MORE_OUTPUTS if getattr(config, name, None)]
    if more and config.return_dict_in_generate:
        raise UnsupportedError(f"{' and '.join(more)}: paged_attn.generate gives tokens, scores and logits; {ON_PAGES}")
    for name in CACHE_NAMES:
        if getattr(given.get(name), "_is_user_defined", False):
            raise UnsupportedError(
                f"{name}: paged_attn.generate keeps keys and values in an engine of its own, which finds shared beginnings of prompts by "
                "itself. Leave the cache out; or leave custom_generate out, and give a paged_attn.PagedCache"
            )
    if unknown := sorted(name for name, value in given.items() if says_something(value) and name not in (*_KNOWN, *_MORE_OUTPUTS)):
        raise UnsupportedError(f"{', '.join(unknown)}: paged_attn.generate takes only token ids and an attention mask; {ON_PAGES}")
