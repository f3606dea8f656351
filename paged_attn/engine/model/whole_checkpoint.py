"""Refuses checkpoints that lack weights or are truncated: transformers would fill in random numbers."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.engine.model.task import Task

AGAIN = "copy or download it again"


def refuse_random_weights(model: Any, missing: Collection[str], config: Any, name: str, task: Task) -> None:
    """Raises UnsupportedError for a checkpoint without weights of parameters that the task needs; `missing`: those that it lacks."""
    why = _why_not_generate(model, missing) if task == "generate" else _why_no_states(missing, task)
    if why:
        held = (getattr(config, "architectures", None) or ["a model"])[0]
        raise UnsupportedError(f"{name!r} holds {held} and no weights of {why}")


def _why_not_generate(model: Any, missing: Collection[str]) -> str:
    if head := _head_among(model, missing):
        return (
            f"{head}: without a language-model head (an embedding model, a classifier) there "
            "is nothing to choose tokens by. Nothing is made up in its place; LLM(..., task='embed') embeds with it"
        )
    parameters = {path for path, _ in model.named_parameters()}
    needed = sorted(path for path in missing if path in parameters)
    if not needed:
        return ""
    more = f" and {len(needed) - 1} others" if len(needed) > 1 else ""
    return (
        f"{needed[0]}{more}, which its config.json asks for: a file is missing, or the config is another model's. Nothing is made up in "
        "their place"
    )


def _why_no_states(missing: Collection[str], task: Task) -> str:
    needed = sorted(path for path in missing if task == "classify" or not path.startswith("pooler."))  # no hidden state depends on it
    does = "embeds" if task == "embed" else "classifies"
    return f"{needed[0]}: it is not a model that {does}. Nothing is made up in its place" if needed else ""


def _head_among(model: Any, missing: Collection[str]) -> str | None:
    head = model.get_output_embeddings()
    paths = [path for path, module in model.named_modules() if module is head] if head is not None else []
    return paths[0] if any(f"{path}.weight" in missing for path in paths) else None


def what_is_broken(error: Exception, name: str) -> str | None:
    """What is wrong with the files of `name`, a directory or a hub id, whose weights raised this; None if it is not their fault."""
    text = str(error)
    if isinstance(error, SafetensorError):
        return f"{_broken_file(name) or f'a file of its weights is not a whole safetensors file: {text}'}; {AGAIN}"
    if "PytorchStreamReader" in text:  # raised by torch.load
        return f"a file of its weights is cut short or damaged: {text.partition('.')[0]}; {AGAIN}"
    if "ignore_mismatched_sizes" in text:  # transformers has printed them as a table
        return "its weights have other shapes than its config.json says (the report above names them); is the config another model's?"
    return None


def _broken_file(name: str) -> str | None:
    for file in sorted(Path(name).glob("*.safetensors")):  # none, where `name` is a hub id
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            return f"{file.name} ({file.stat().st_size:,} bytes) is not a whole safetensors file: {error}"
    return None
