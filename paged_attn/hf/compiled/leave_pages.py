"""A `generate` that cannot stay on pages: from a `RaggedCache` to one of transformers' own."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from paged_attn.hf.cache_name import CACHE_NAME
from paged_attn.hf.compiled.ragged_cache import RaggedCache
from paged_attn.hf.generate.refuse import generate_frame


def may_leave_pages(model: PreTrainedModel, cache: RaggedCache, given: dict[str, Any]) -> bool:
    """Whether a call with these keywords is one of `generate`, which keeps whatever cache it gets back, for the rows of the cache."""
    ids = given.get("input_ids")
    of_its_rows = isinstance(ids, Tensor) and ids.ndim == 2 and len(ids) == cache.batch_size
    return of_its_rows and generate_frame(model) is not None and not torch.is_grad_enabled() and not model.training


def computed_again(model: Any, cache: RaggedCache) -> DynamicCache:
    """A cache with the same tokens, which the model as it is written has computed."""
    again = DynamicCache(config=model.config)
    ids = torch.from_numpy(cache.ids).to(model.device)
    place = torch.arange(cache.length, device=ids.device) - torch.from_numpy(cache.padding).to(ids.device)[:, None]
    given: dict[str, Any] = {"position_ids": place.clamp(min=0), "logits_to_keep": 1}
    taken = inspect.signature(model.forward).parameters
    model._call_impl(
        input_ids=ids, attention_mask=(place >= 0).long(), use_cache=True, **{CACHE_NAME: again},
        **{name: value for name, value in given.items() if name in taken},
    )  # fmt: skip
    return again
