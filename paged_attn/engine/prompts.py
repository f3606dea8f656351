"""Reads callers' inputs one by one: prompts in every accepted form, with the adapter of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

from paged_attn.shown import shown

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from paged_attn.engine.sampling_params import SamplingParams

Prompt = str | Sequence[int]
PROMPT_FIELDS = ("prompt", "prompt_token_ids", "input_ids", "attention_mask", "token_type_ids")
# What a tokenizer may say besides, and no model is called with.
ABOUT_TOKENS = (
    "special_tokens_mask",
    "offset_mapping",
    "length",
    "num_truncated_tokens",
    "overflowing_tokens",
    "overflow_to_sample_mapping",
)
Params: TypeAlias = "SamplingParams | GenerationConfig"
Loras: TypeAlias = "str | Sequence[str | None] | None"


def loras_of_each(lora: Loras, count: int) -> list[str | None]:
    """Names of adapters, one for each of so many prompts; raises ValueError for another number of them."""
    if lora is not None and not isinstance(lora, (str, Sequence)):
        raise TypeError(f"lora is {shown(lora)}; allowed: the name of an adapter, a list with a name or None for each prompt, or None")
    names = [lora] * count if lora is None or isinstance(lora, str) else list(lora)
    if len(names) != count:
        raise ValueError(f"{len(names)} names of adapters in lora for {count} prompts; give one for all or one for each")
    return names


def one_of(params: Any, sampling_params: Any) -> Any:
    """The one that is given; raises TypeError if both are."""
    if params is not None and sampling_params is not None:
        raise TypeError("params and sampling_params are the same, and both are given; leave one out")
    return sampling_params if params is None else params


def as_list(prompts: Any) -> list[Prompt]:
    """Prompts as `generate` takes them, one by one; raises TypeError for anything else."""
    if isinstance(prompts, Mapping):
        return _of_mapping(prompts)
    if hasattr(prompts, "tolist"):  # a tensor or an array
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise TypeError(f"prompts is a {type(prompts).__name__}; allowed are a text, a list of token ids, or a list of those")
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral)):
        return [prompts]
    return [one for each in prompts for one in (_of_mapping(each) if isinstance(each, Mapping) else [each])]


def _of_mapping(prompt: Mapping[str, Any]) -> list[Prompt]:
    """What {"prompt": text}, {"prompt_token_ids": ids} or a tokenizer's {"input_ids": ..., "attention_mask": ...} stands for. Raises
    TypeError: it has anything else that a model would be called with."""
    allowed = ", ".join(map(repr, PROMPT_FIELDS[:2])) + f" or {PROMPT_FIELDS[2]!r}"
    if "role" in prompt:
        raise TypeError("a message of a conversation is not a prompt; give the conversation to LLM.chat, which has the model's template")
    if all(prompt.get(name) is None for name in PROMPT_FIELDS[:3]):
        raise TypeError(f"a prompt is a mapping of {', '.join(map(repr, prompt))}; allowed are {allowed}")
    if unknown := [name for name, value in prompt.items() if name not in (*PROMPT_FIELDS, *ABOUT_TOKENS) and value is not None]:
        raise TypeError(f"a prompt is a mapping with {unknown[0]!r}, which is not served; allowed are {allowed} and attention_mask")
    types = prompt.get("token_type_ids")
    if types is not None and any(map(any, _rows(types))):
        raise TypeError("a prompt's token_type_ids are not all 0, which is served for pairs of texts only: LLM.score(text_1, text_2)")
    for name in ("prompt_token_ids", "prompt"):
        if prompt.get(name) is not None:
            return [prompt[name]]
    rows, mask = _rows(prompt["input_ids"]), prompt.get("attention_mask")
    kept = [[1] * len(row) for row in rows] if mask is None else _rows(mask)
    if list(map(len, rows)) != list(map(len, kept)):
        raise ValueError(
            f"a prompt's attention_mask has rows of {', '.join(map(str, map(len, kept)))} entries and its input_ids of "
            f"{', '.join(map(str, map(len, rows)))}; allowed: one entry for each token"
        )
    return [[token for token, keep in zip(*pair, strict=True) if keep] for pair in zip(rows, kept, strict=True)]


def _rows(values: Any) -> list[list[int]]:
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    return [values] if not values or isinstance(values[0], Integral) else values
