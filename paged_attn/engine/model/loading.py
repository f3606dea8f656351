"""Loading a Hugging Face model and its tokenizer from a directory, a GGUF file or the hub.

Checkpoints that lack weights or are truncated are refused: transformers would fill in random numbers.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.install_line import install_line
from paged_attn.backends.devices import checked_device
from paged_attn.engine.model.auto_class import auto_class
from paged_attn.engine.model.load_options import LoadOptions, checked_model_path
from paged_attn.engine.model.task import Task, task_of
from paged_attn.engine.pooling.sentence_transformers import EmbeddingDefaults, embedding_defaults, has_modules
from paged_attn.engine.setting_names import SAME_DTYPE
from paged_attn.parallel.plan import plan_of
from paged_attn.parallel.shard import distributed_config
from paged_attn.parallel.torchrun import num_processes
from paged_attn.progress import asked, bar

PLAIN = LoadOptions()
AGAIN = "copy or download it again"


def load_model(
    path: str | Path,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    sharded: bool = False,
    options: LoadOptions = PLAIN,
    task: Task = "generate",
) -> tuple[Any, Any]:
    """(model in evaluation mode, tokenizer or None if the checkpoint has none). Nothing is asked on stdin.

    Args:
        path: a directory, a hub id, or a GGUF file.
        dtype: a floating type or its name; None and "auto" are the checkpoint's own.
        device: None is `default_device()`.
        sharded: read what the model's plans give to this rank of the process group, and no more.
        task: as `checkpoint_task` says: which head is read.

    Raises:
        ValueError: nothing loadable is there; the message holds transformers' own words. Or it cannot be sharded.
        UnsupportedError: what is there continues no text.
    """
    if options.expert_parallel and not sharded:
        raise ValueError("expert parallelism is over several processes, and this is one; run the command under torchrun, or leave it out")
    name, gguf = checked_model_path(path, options.gguf_file)
    device, dtype = checked_device(device), checked_dtype(dtype)
    with bar(total=3, what=f"loading {Path(gguf or name).name}", unit="part") as shown:
        shown.set_postfix_str("weights")
        model = _model(name, gguf, dtype, device, sharded, options, task)
        if sharded and plan_of(model) is None:
            raise ValueError(f"{type(model).__name__} has no tensor-parallel plan; run it in one process, without torchrun")
        model.eval()
        shown.update()
        shown.set_postfix_str(f"to {device}")
        if options.quantization_config is None:  # otherwise it is there already, and some kinds cannot be moved
            torch.nn.Module.to(model, device)
        shown.update()
        shown.set_postfix_str("tokenizer")
        if options.tokenizer is not None:
            own = str(options.tokenizer) == name  # a revision is the model's; another repository has others
            tokenizer = load_tokenizer(options.tokenizer, options if own else replace(options, revision=None))
        elif options.has_tokenizer:
            tokenizer = None
        else:
            tokenizer = _tokenizer(name, gguf, options) if gguf or _has_tokenizer(name) else None
        shown.update()
    return model, tokenizer


def checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """None for the checkpoint's own. Raises ValueError: no floating type of PyTorch."""
    found: Any = dtype
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        found = getattr(torch, SAME_DTYPE.get(name, name), None)
    if dtype is None or dtype == "auto":
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype is {dtype!r}; allowed are bfloat16, float16 and float32, as torch.bfloat16 or by name, and auto")
    return found


def load_tokenizer(path: str | Path, options: LoadOptions = PLAIN) -> Any:
    """The tokenizer of a directory or a hub id. Raises ValueError: there is none; the message holds transformers' own words."""
    name = str(path)
    folder = Path(name).expanduser()
    if (isinstance(path, Path) or name.startswith((".", "/", "~"))) and not folder.is_dir():
        raise ValueError(f"no tokenizer at {name!r}: not a directory. Give a directory with tokenizer.json, or a hub id like 'org/name'")
    return _tokenizer(str(folder) if folder.is_dir() else name, None, options)


def _model(
    name: str, gguf: str | None, dtype: torch.dtype | None, device: torch.device, sharded: bool, options: LoadOptions, task: Task
) -> Any:
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    where, place = _where(gguf, options), name if gguf is None else f"{name}/{gguf}"
    more: dict[str, Any] = {}
    if sharded:
        if importlib.util.find_spec("accelerate") is None:
            raise ValueError(f"to read shards transformers needs accelerate; install the extra: {install_line('tp')}")
        more["distributed_config"] = distributed_config(num_processes(), options.expert_parallel)
    if options.quantization_config is not None:
        _check_installed("accelerate", "quantization_config")
        more |= {"quantization_config": options.quantization_config, "device_map": {"": device}}
    try:
        with _their_bars():
            config = AutoConfig.from_pretrained(name, **where)
            other: Any = AutoModel if task == "embed" else AutoModelForSequenceClassification
            auto = auto_class(config, name) if task == "generate" else other
            model, info = auto.from_pretrained(name, dtype=dtype or "auto", output_loading_info=True, **where, **more)
            refuse_random_weights(model, info["missing_keys"], config, name, task)
            return model
    except UnsupportedError:
        raise
    except (OSError, ValueError, ImportError) as error:
        if not options.trust_remote_code and "trust_remote_code" in str(error):
            raise ValueError(
                f"{name!r} is made of Python code of its own, which runs only if you say so: read it, and then give "
                "trust_remote_code=True (--trust-remote-code)"
            ) from error
        raise ValueError(f"no causal language model could be loaded from {place!r}: {error}") from error
    except (RuntimeError, SafetensorError) as error:
        if (broken := what_is_broken(error, name)) is None:
            raise
        raise ValueError(f"no causal language model could be loaded from {place!r}: {broken}") from error


def checkpoint_task(path: str | Path, task: Task, options: LoadOptions = PLAIN) -> tuple[Task, EmbeddingDefaults | None]:
    """What a checkpoint is for, if `task` is "auto", and how it embeds, if its folder says so. Raises ValueError: nothing loadable is
    there; UnsupportedError: it embeds in a way that is not known."""
    name, gguf = checked_model_path(path, options.gguf_file)
    if task in ("generate", "classify") or gguf is not None:
        return ("generate" if task == "auto" else task), None
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, **_where(gguf, options))
    except (OSError, ValueError, ImportError):
        return ("generate" if task == "auto" else task), None  # `load_model` says what is wrong
    architecture = str((getattr(config, "architectures", None) or [""])[0])
    found = task_of(architecture, config, has_modules(name, options.revision)) if task == "auto" else task
    return found, embedding_defaults(name, options.revision) if found == "embed" else None


def _where(gguf: str | None, options: LoadOptions) -> dict[str, Any]:
    """What configs, models and tokenizers are told alike. Without a plain False transformers would ask on stdin."""
    where: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    if options.revision is not None:
        where["revision"] = options.revision
    if gguf is not None:
        _check_installed("gguf", "a GGUF file")
        where["gguf_file"] = gguf
    return where


def _check_installed(package: str, what: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{what} needs the package {package}, which is not installed: pip install {package}")


@contextmanager
def _their_bars() -> Iterator[None]:
    """transformers' own bars are as the user set them, but none is drawn where we are told to draw none."""
    from transformers.utils import logging

    on = sys.stderr.isatty() if asked() is None else asked()
    quiet = not on and logging.is_progress_bar_enabled()
    if quiet:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if quiet:
            logging.enable_progress_bar()


def _has_tokenizer(name: str) -> bool:
    """What is not a directory may have one."""
    return not os.path.isdir(name) or any(Path(name).glob("*token*")) or any(Path(name).glob("*vocab*"))


def _tokenizer(name: str, gguf: str | None, options: LoadOptions) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **_where(gguf, options))
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer could be loaded from {name!r}: {error}") from error
    if isinstance(said := getattr(tokenizer, "deprecation_warnings", None), dict):
        said["sequence-length-is-longer-than-the-specified-maximum"] = True  # we refuse such a prompt, or the model takes it
    return tokenizer


def refuse_random_weights(model: Any, missing: Collection[str], config: Any, name: str, task: Task) -> None:
    """Raises UnsupportedError for a checkpoint without weights of parameters that the task needs; `missing`: those that it lacks."""
    why = _why_not_generate(model, missing) if task == "generate" else _why_no_states(missing, task)
    if why:
        held = (getattr(config, "architectures", None) or ["a model"])[0]
        raise UnsupportedError(f"{name!r} holds {held} and no weights of {why}")


def _why_not_generate(model: Any, missing: Collection[str]) -> str:
    head = model.get_output_embeddings()
    heads = [path for path, module in model.named_modules() if module is head] if head is not None else []
    if any(f"{path}.weight" in missing for path in heads):
        return (
            f"{heads[0]}: without a language-model head (an embedding model, a classifier) there "
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
