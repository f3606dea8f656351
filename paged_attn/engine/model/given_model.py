"""The model that `LLM` was given, a loaded one or the place of a checkpoint, with its tokenizer and its task."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from paged_attn.calling.peft_models import inside_peft
from paged_attn.calling.uncompiled import uncompiled
from paged_attn.engine.model.load_options import LoadOptions
from paged_attn.engine.model.model_state import hooked_module
from paged_attn.engine.model.task import Task, task_of
from paged_attn.engine.pooling.sentence_transformers import EmbeddingDefaults

logger = logging.getLogger("paged_attn")


class GivenModel(NamedTuple):
    """A model in memory, its tokenizer if there is one, its task (not "auto"), and how its folder says that it embeds."""

    model: nn.Module
    tokenizer: Any
    task: Task
    defaults: EmbeddingDefaults | None


def given_model(
    model: nn.Module | str | Path,
    tokenizer: Any,
    task: Task,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    read: LoadOptions,
) -> GivenModel:
    """Load what is not loaded.

    Args:
        tokenizer: None, a tokenizer, or the place of one.
        dtype, device: see `load_model`.
        read: as the caller gave it; its `tokenizer` and `has_tokenizer` are set here.

    Raises:
        ValueError: a setting for loading, and the model is loaded; or as `load_model` does.
    """
    own = tokenizer if isinstance(tokenizer, (str, Path)) else None
    options = replace(read, tokenizer=own, has_tokenizer=tokenizer is not None and own is None)
    defaults = None
    if isinstance(model, nn.Module):
        _refuse_load_settings(dtype, device, read)
        if own is not None:
            from paged_attn.engine.model.loading import load_tokenizer

            tokenizer = load_tokenizer(own, options)
        held = model
        task = task_of(type(inside_peft(uncompiled(held))).__name__, getattr(held, "config", None)) if task == "auto" else task
    else:
        from paged_attn.engine.model.loading import checkpoint_task, load_model

        task, defaults = checkpoint_task(model, task, options)
        held, loaded = load_model(model, dtype, device, options=options, task=task)
        tokenizer = tokenizer if options.has_tokenizer else loaded
    return GivenModel(held, tokenizer, task, defaults)


def warn_of_hook(model: nn.Module) -> None:
    """Warn of a forward hook in a model whose steps run as a graph."""
    if hooked := hooked_module(model):
        logger.warning(
            "%s has a forward hook: answers follow what it returns, but it is not called for their tokens, and what it records is "
            "of other prompts; the model itself, without LLM or custom_generate, calls it",
            hooked,
        )


def _refuse_load_settings(dtype: Any, device: Any, read: LoadOptions) -> None:
    if dtype is not None or device is not None:
        raise ValueError("dtype and device are for loading from a path; convert a loaded model yourself: model.to(device, dtype)")
    if given := [name for name in read.given if name != "trust_remote_code"]:
        raise ValueError(f"{given[0]} is for loading from a path; give it to the from_pretrained that loads the model")
