"""Loading a Hugging Face model and its tokenizer from a directory or the hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def load_model(path: str | Path, dtype: torch.dtype | None, device: torch.device | str | None) -> tuple[Any, Any]:
    """(model in evaluation mode, tokenizer or None if the checkpoint has none).

    Raises:
        ValueError: nothing loadable is there; the message holds transformers' own words.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = str(path)
    looks_local = isinstance(path, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not Path(name).expanduser().is_dir():
        raise ValueError(
            f"no model at {name!r}: not a directory. Give a directory with config.json and safetensors, or a hub id like 'org/name'"
        )
    name = str(Path(name).expanduser()) if looks_local else name
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto")
    except (OSError, ValueError) as error:
        raise ValueError(f"no causal language model could be loaded from {name!r}: {error}") from error
    model.eval()
    torch.nn.Module.to(model, device or "cpu")
    return model, _tokenizer(AutoTokenizer, name)


def _tokenizer(auto: Any, name: str) -> Any:
    if os.path.isdir(name) and not any(Path(name).glob("*token*")) and not any(Path(name).glob("*vocab*")):
        return None
    return auto.from_pretrained(name)
