"""The key of a model's graph on disk: everything that determines the trace and the passes, except the code in files."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from torch import nn

from paged_attn.capture.compiled_pieces.artifact_key import settings_text, source_digest
from paged_attn.capture.split.split_ops import split_ops
from paged_attn.compiled.options import CompileOptions
from paged_attn.hashing.model_text import model_text
from paged_attn.hashing.stable_hasher import StableHasher
from paged_attn.passes.pass_list import PASSES
from paged_attn.recurrent.layer import RecurrentLayer

# All of ours that takes part in a capture, as of when it is imported: files may be edited under a running process.
_SOURCES = source_digest(
    "", "attn_ops", "passes", "capture", "calling", "check", "compiled", "engine/tracing", "graph_cache", "hashing", "parallel", "recurrent"
)
_INSTALLED = (".dist-info", ".egg-info")
_FOLDERS = ("debug_dir_root", "base_dir")  # settings that hold the working directory and torch's location


def graph_key(model: nn.Module, options: CompileOptions, positions: bool, recurrent: Sequence[RecurrentLayer]) -> str:
    """`recurrent`: layers that are ops in the graph. Raises Indescribable for a model of which no text says all."""
    facts = [
        f"sources {_SOURCES}", _versions(), f"options {sorted(asdict(replace(options, runs_with=None)).items())} positions {positions}",
        f"forward {inspect.signature(model.forward)}", f"inference mode {torch.is_inference_mode_enabled()}",
        f"split ops {sorted(op.name() for op in split_ops())}", f"passes {[each.name for each in PASSES]}",
        *_devices(), *_dynamo(), *settings_text(), model_text(model), *(layer.as_traced for layer in recurrent),
    ]  # fmt: skip
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _dynamo() -> list[str]:
    from torch._dynamo import config

    values = config.save_config_portable(ignore_private_configs=False)
    hasher = StableHasher({}, strict=False)
    return [f"dynamo {name}={hasher.text(values[name])}" for name in sorted(values) if name not in _FOLDERS]


def _devices() -> list[str]:
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"cuda {device.name} {device.major}.{device.minor}" for device in found]


@functools.cache
def _versions() -> str:
    """Versions of Python, torch and all installed packages: transformers asks which there are."""
    names = {name for entry in sys.path for name in _listed(entry or ".") if name.endswith(_INSTALLED)}
    return f"python {sys.version_info[:3]} torch {torch.__version__} {torch.version.git_version} {sorted(names)}"


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # an archive, or nothing at all
        return []
