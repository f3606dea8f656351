"""Facts about a model: dtype, device, and what its config says, if it has one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

PADDING = 1024  # most rows by which a padded embedding table exceeds the vocabulary


def text_config(model: nn.Module | None) -> Any:
    """The config of the language model, or None."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def max_positions(model: nn.Module | None) -> int | None:
    """How many positions the model has, or None if it states no limit (XLNet says -1)."""
    limit: int | None = getattr(text_config(model), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def least(*limits: int | None) -> int | None:
    """The smallest of some limits, of which None is none; None if there is none."""
    return min((limit for limit in limits if limit is not None), default=None)


def model_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the first floating-point parameter; float32 if there is none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def model_device(model: nn.Module) -> torch.device:
    """The device of the first parameter or buffer; the CPU if there is none."""
    return next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu"))


def is_vocabulary(width: int, rows: int) -> bool:
    """Whether logits of this width can belong to an embedding table of this many rows: equal, or slightly less if it is padded."""
    return 0 <= rows - width < min(width, PADDING)
