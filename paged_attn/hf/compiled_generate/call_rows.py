"""Turns a call that `generate` makes of a model into rows of tokens, and those into steps of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from paged_attn.calling.plain_modes import autocasts
from paged_attn.hf.cache_name import CACHE_NAMES
from paged_attn.hf.compiled_generate.ragged_cache import Lengths
from paged_attn.hf.generate.refuse import says_something
from paged_attn.passes.fx.model_facts import text_config

# Keywords that a call may have. Others, such as `labels`, have no place in a step. transformers passes on the `tokenizer` for stop strings.
_KNOWN = {"input_ids", *CACHE_NAMES, "attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict", "tokenizer"}
_MORE_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")


class CallRows(NamedTuple):
    """tokens [rows, new] of token ids; padding [rows], each row's on its left; logits are wanted of the last `wanted` tokens."""

    tokens: list[list[int]]
    padding: Lengths
    wanted: int


def why_not(model: nn.Module, given: dict[str, Any]) -> str:
    """Why a call with these keywords cannot be a step of an engine; "" if the keywords allow it."""
    if model.training:
        return "the model is in training mode (model.eval() ends that)"
    if torch.is_grad_enabled():
        return "gradients are on (torch.no_grad() turns them off)"
    if autocasts():
        return "autocast is on"
    return more_than_tokens(model, given)


def more_than_tokens(model: nn.Module, given: dict[str, Any]) -> str:
    """What the keywords ask for besides the logits of rows of tokens; "" if nothing."""
    ids = given.get("input_ids")
    config: Any = model.config
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel():
        return "it has no input_ids of rows and tokens"
    odd = [n for n, v in given.items() if says_something(v) and n not in _KNOWN and not (n in _MORE_OUTPUTS and v is False)]
    odd += [n for n in _MORE_OUTPUTS for c in (config, text_config(model)) if getattr(c, n, False)]
    odd += [f"{n}=False" for n in ("use_cache", "return_dict") if given.get(n) is False]
    if odd:
        return f"it has {', '.join(dict.fromkeys(odd))}"
    if not isinstance(given.get("logits_to_keep", 0), int):
        return "logits_to_keep is not a number"
    return ""


def call_rows(given: dict[str, Any], length: int, padding: Lengths | None) -> CallRows | str:
    """The rows, or the reason why there are none; waits for the device once.

    Args:
        length: tokens of every row in the cache, including padding.
        padding: of each row; None: read it off the mask of a first call.
    """
    ids, mask, positions = given["input_ids"], given.get("attention_mask"), given.get("position_ids")
    rows, new = ids.shape
    if padding is not None and len(padding) != rows:
        return f"it has {rows} rows, and the cache {len(padding)}"
    if mask is not None and tuple(mask.shape) != (rows, length + new):
        return f"its attention_mask is {list(mask.shape)}, and {[rows, length + new]} tokens are there"
    if positions is not None and tuple(positions.shape) not in ((rows, new), (1, new)):
        return f"its position_ids are {list(positions.shape)}"
    if padding is not None:
        shift = torch.from_numpy(padding).to(ids.device)
    else:
        shift = torch.zeros(rows, dtype=torch.int64, device=ids.device) if mask is None else (mask == 0).sum(1)
    index = torch.arange(length + new, device=ids.device)
    padded = counted = torch.ones((), dtype=torch.bool, device=ids.device)
    if mask is not None:
        padded = ((mask == 1) == (index >= shift[:, None])).all() & ((mask == 0) | (mask == 1)).all()
    if positions is not None:
        count = index[length:] - shift[:, None]
        counted = ((positions == count) | (count < 0)).all()
    host = torch.cat([ids.flatten().long(), shift, padded.long()[None], counted.long()[None]]).cpu()
    tokens, shifts = host[: rows * new].view(rows, new).tolist(), np.asarray(host[rows * new : -2], np.int64)
    if not host[-2]:
        return "its attention_mask has zeros elsewhere than on the left (padding_side='left' of a tokenizer puts all of them there)"
    if not host[-1]:
        return "its position_ids do not count each row's tokens from 0 on, padding aside"
    if (shifts >= length + new).any():
        return "a row is only padding"
    if ((host[: rows * new].view(rows, new).numpy() < 0) & (np.arange(length, length + new) >= shifts[:, None])).any():
        return "it has a negative token id"
    wanted = min(given.get("logits_to_keep") or new, new)
    if wanted > int((length + new - np.maximum(shifts, length)).min()):
        return "logits of padding are wanted"
    return CallRows(tokens, shifts, wanted)


@dataclass(frozen=True)
class Part:
    """Tokens `start` to `end - 1` of a row of the call; logits are wanted of the last `num_logits`."""

    row: int
    start: int
    end: int
    num_logits: int


def steps(counts: Sequence[int], wanted: int, most_tokens: int, most_rows: int) -> Iterator[list[Part]]:
    """All tokens of rows with `counts` tokens each, in order, with at most `most_tokens` tokens and `most_rows` rows per step. `wanted`:
    number of each row's last tokens whose logits are wanted, at most all."""
    parts: list[Part] = []
    left = most_tokens
    for row, count in enumerate(counts):
        start = 0
        while start < count:
            end = min(start + left, count)
            parts.append(Part(row, start, end, max(min(end - max(count - wanted, 0), end - start), 0)))
            left -= end - start
            start = end
            if not left or len(parts) == most_rows:
                yield parts
                parts, left = [], most_tokens
    if parts:
        yield parts
