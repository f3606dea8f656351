"""What a model's config says of it, where it has one."""

from __future__ import annotations

from typing import Any

from torch import nn


def text_config(model: nn.Module | None) -> Any:
    """The config of the language model, or None."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def max_positions(model: nn.Module | None) -> int | None:
    """How many positions the model has, or None if it states no limit."""
    limit: int | None = getattr(text_config(model), "max_position_embeddings", None)
    return limit
