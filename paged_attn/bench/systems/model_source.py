"""The model that all systems run: a checkpoint, or random weights of a known shape."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path
from typing import Any

from paged_attn.bench.shapes import shape_config
from paged_attn.bench.systems.job import ModelSource


def write_shape(shape: str, dtype: str, folder: Path, layers: int | None = None) -> str:
    """A folder with the config of a shape, whole or of its first layers, and no weights; returns it."""
    import torch
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    settings = shape_config(shape, layers)
    architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[settings["model_type"]]]
    config = AutoConfig.for_model(**settings, architectures=architectures, dtype=getattr(torch, dtype))
    config.save_pretrained(folder)
    return str(folder)


def save_weights(source: ModelSource, folder: Path) -> ModelSource:
    """The source as a checkpoint on disk, so that systems that draw no weights themselves run the same ones.

    A process of its own draws them: this one would keep the GPU's memory.

    Raises:
        ValueError: the disk has no room for them.
        ChildProcessError: that process failed.
    """
    needed, free = _bytes_of(source), shutil.disk_usage(folder.parent).free
    if needed > free:
        raise ValueError(
            f"random weights take {needed / 1e9:.1f} GB on disk, and {str(folder.parent)!r} has {free / 1e9:.1f} GB free; set TMPDIR to a "
            "folder with room, cut the shape with --layers, or give --no-save-weights"
        )
    process = multiprocessing.get_context("spawn").Process(target=_draw_and_save, args=(source, str(folder)))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise ChildProcessError(
            f"drawing random weights and writing them to {folder} ended with status {process.exitcode}; its error is above"
        )
    return ModelSource(str(folder), False, source.dtype, source.device)


def _bytes_of(source: ModelSource) -> int:
    model = random_model(read_config(source.path), source.dtype, "meta")
    return sum(weight.nbytes for weight in model.parameters())


def _draw_and_save(source: ModelSource, folder: str) -> None:
    load(source).save_pretrained(folder)


def read_config(path: str) -> Any:
    """Raises ValueError: no config there."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"no model could be read from {path!r}: {error}") from error


def text_config(path: str) -> Any:
    return read_config(path).get_text_config(decoder=True)


def load(source: ModelSource) -> Any:
    """The Hugging Face model in evaluation mode on its device. Raises ValueError: the GPU has no room for random weights."""
    import torch

    if source.random_weights:
        config = read_config(source.path)
        config.name_or_path = ""  # a temporary folder, by which a second start would not know the model's graph again
        try:
            return random_model(config, source.dtype, source.device)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"random weights take {_bytes_of(source) / 1e9:.0f} GB, more than {source.device} has free; cut the shape with --layers"
            ) from error
    from paged_attn.engine.model.loading import load_model

    return load_model(source.path, source.dtype, source.device)[0]


def random_model(config: Any, dtype: str, device: str) -> Any:
    """A model of a config, in evaluation mode; its weights are the same in every process on one kind of device."""
    import torch
    from transformers import AutoModelForCausalLM

    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()
