"""Models of peft: the model of transformers inside, whose modules hold the adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.model_code import model_code
from paged_attn.calling.call_signature import few_ids
from paged_attn.calling.plain_modes import as_served
from paged_attn.passes.fx.model_facts import model_device


def inside_peft(model: nn.Module) -> nn.Module:
    """The model inside a PeftModel; any other as it is."""
    # Where peft has learned a prompt, base_model is the model itself.
    tuner = getattr(model, "base_model", None) if type(model).__module__.startswith("peft.") else None
    inner = getattr(tuner, "model", None) if type(tuner).__module__.startswith("peft.") else tuner
    return inner if isinstance(inner, nn.Module) else model


def served_inside_peft(model: nn.Module) -> nn.Module:
    """`inside_peft`, if a call of it gives what peft's own call gives.

    Raises:
        UnsupportedError: it does not.
    """
    inner = inside_peft(model)
    if inner is model:
        return model
    ids = few_ids(inner, 6, model_device(inner))[None, 1:]  # without 0, which may be padding
    with as_served(model), model_code(lambda why: UnsupportedError(f"{type(model).__name__} cannot be called on 5 token ids: {why}")):
        given, expected = (_values(each(input_ids=ids)) for each in (inner, model))
    if given is None or expected is None or given.shape != expected.shape or not torch.equal(given, expected):
        raise UnsupportedError(
            f"peft's own call of {type(model).__name__} gives other values than the {type(inner).__name__} inside, as with a prompt that "
            "peft has learned: pages hold only the tokens of texts. peft's own call runs it; adapters that change layers (LoRA, IA3) are "
            "served"
        )
    return inner


def _values(output: Any) -> Tensor | None:
    found = getattr(output, "logits", None)
    found = getattr(output, "last_hidden_state", None) if found is None else found
    return found if isinstance(found, Tensor) else None
