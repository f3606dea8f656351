"""Temporarily changes a model's configs: the attention implementation, and outputs other than logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from paged_attn.attn_ops.replaced_entries import replaced_entries

_MORE_OUTPUTS = ("output_hidden_states", "_output_attentions", "output_router_logits")


def attention_configs(model: nn.Module) -> list[Any]:
    """Every distinct config in the model that names an attention implementation, sub-configs included."""
    configs: list[Any] = []
    pending: list[Any] = [m.config for m in model.modules() if hasattr(getattr(m, "config", None), "_attn_implementation_internal")]
    while pending:
        config = pending.pop()
        if not any(config is other for other in configs):
            configs.append(config)
            pending += [sub for key in config.sub_configs if (sub := getattr(config, key, None)) is not None]
    return configs


@contextmanager
def attention_implementation(model: Any, name: str) -> Iterator[None]:
    """The model with another attention implementation; afterwards every config is as before. Raises ValueError, ImportError: transformers'
    own, if the model does not support it."""
    before = [(config, config._attn_implementation_internal) for config in attention_configs(model)]
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


@contextmanager
def logits_alone(model: nn.Module) -> Iterator[None]:
    """The model without the hidden states, attention weights and router logits that its configs may have it return besides.

    It collects them in context variables under a lock, which torch.compile cannot trace; attention weights are nothing that a paged
    attention has.
    """
    with ExitStack() as undo:
        for config in attention_configs(model):
            wanted = {name: False for name in _MORE_OUTPUTS if vars(config).get(name)}
            undo.enter_context(replaced_entries(vars(config), wanted))
        yield
