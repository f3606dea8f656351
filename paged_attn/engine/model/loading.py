"""Loading a Hugging Face model and its tokenizer from a directory or the hub."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from paged_attn.backends.devices import default_device
from paged_attn.capture.graphs.progress import asked, bar
from paged_attn.engine.model.model_path import checked_model_path
from paged_attn.parallel.plan import plan_of


def load_model(path: str | Path, dtype: torch.dtype | None, device: torch.device | str | None, sharded: bool = False) -> tuple[Any, Any]:
    """(model in evaluation mode, tokenizer or None if the checkpoint has none).

    Args:
        dtype: None is the checkpoint's own.
        device: None is `default_device()`.
        sharded: read what the model's `tp_plan` gives to this rank of the process group, and no more.

    Raises:
        ValueError: nothing loadable is there; the message holds transformers' own words. Or it can not be sharded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = checked_model_path(path)
    with bar(total=3, what=f"loading {Path(name).name}", unit="part") as shown:
        shown.set_postfix_str("weights")
        try:
            with _their_bars():
                more = {"distributed_config": _own_shards()} if sharded else {}
                model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto", **more)
        except (OSError, ValueError) as error:
            raise ValueError(f"no causal language model could be loaded from {name!r}: {error}") from error
        if sharded and plan_of(model) is None:
            raise ValueError(f"{type(model).__name__} has no tensor-parallel plan; run it in one process, without torchrun")
        model.eval()
        shown.update()
        device = default_device() if device is None else torch.device(device)
        shown.set_postfix_str(f"to {device}")
        torch.nn.Module.to(model, device)
        shown.update()
        shown.set_postfix_str("tokenizer")
        tokenizer = _tokenizer(AutoTokenizer, name)
        shown.update()
    return model, tokenizer


def _own_shards() -> Any:
    if importlib.util.find_spec("accelerate") is None:
        raise ValueError("to read shards transformers needs accelerate; install the extra: pip install 'paged-attn[tp]'")
    from transformers.distributed.configuration_utils import DistributedConfig

    return DistributedConfig(tp_plan="auto")


@contextmanager
def _their_bars() -> Iterator[None]:
    """transformers' own bars are as the user set them, but none is drawn where we are told to draw none."""
    from transformers.utils import logging

    quiet = asked() is False and logging.is_progress_bar_enabled()
    if quiet:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if quiet:
            logging.enable_progress_bar()


def _tokenizer(auto: Any, name: str) -> Any:
    if os.path.isdir(name) and not any(Path(name).glob("*token*")) and not any(Path(name).glob("*vocab*")):
        return None
    return auto.from_pretrained(name)
