"""Finds the graph that an earlier process traced from the same model, and keeps the one that this process traced.

Its key is everything that determines the trace and the passes, except the code in files.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paged_attn.capture.compiled_pieces.artifact_key import settings_text, source_digest
from paged_attn.capture.split.split_ops import split_ops
from paged_attn.compiled.options import CompileOptions
from paged_attn.compiled_graph import CompiledGraph
from paged_attn.graph_cache.entries import Entries
from paged_attn.graph_cache.record import record_of, restored
from paged_attn.hashing.code_files import module_digest, modules_of
from paged_attn.hashing.model_text import OwnedTensors, model_text
from paged_attn.hashing.stable_hasher import Indescribable, StableHasher, tensor_digest
from paged_attn.hf.patch import register_attention
from paged_attn.passes.fx.model_facts import model_device
from paged_attn.passes.pass_list import PASSES
from paged_attn.passes.runner import dump_folder
from paged_attn.recurrent.layer import RecurrentLayer
from paged_attn.shown import shown
from paged_attn.stopwatch import part

logger = logging.getLogger("paged_attn")
# For example an op that is not registered in this process, or a file that something else has changed.
_UNUSABLE = (LookupError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError, AssertionError)
MOST_EVALUATED_BYTES = 256 << 20  # in all tensors whose values the proofs depend on
# All of ours that takes part in a capture, as of when it is imported: files may be edited under a running process.
_SOURCES = source_digest(
    "", "attn_ops", "passes", "capture", "calling", "check", "compiled", "engine/tracing", "graph_cache", "hashing", "parallel", "recurrent"
)
_INSTALLED = (".dist-info", ".egg-info")
_FOLDERS = ("debug_dir_root", "base_dir")  # settings that hold the working directory and torch's location


class CachedGraphs:
    """The graphs on disk of one model in its current state, traced with these settings.

    A record is found by a key (`graph_key`), and used if its evidence still holds: the code of every file that the trace went through, and
    the values of all tensors that the passes evaluated. The caller then runs the self-check, as after a trace.
    """

    def __init__(self, entries: Entries, key: str, model: nn.Module, options: CompileOptions, recurrent: Sequence[RecurrentLayer]) -> None:
        self.entries, self.key, self.model, self.options, self.recurrent = entries, key, model, options, tuple(recurrent)

    @classmethod
    def of(
        cls, model: nn.Module, options: CompileOptions, positions: bool, recurrent: Sequence[RecurrentLayer] = ()
    ) -> CachedGraphs | None:
        """None if nothing may be kept: there is no cache, no self-check, passes are dumped, or no text describes the model completely (the
        log says why). `recurrent`: layers that are ops in the graph, as found in this process."""
        entries = Entries.of_user()
        if entries is None or not options.self_check or dump_folder() is not None:
            return None
        register_attention()  # a trace reads transformers' tables: they must not depend on whether a model was hooked before
        started = time.perf_counter()
        try:
            key = graph_key(model, options, positions, recurrent)
        except Indescribable as reason:
            _not_kept(model, reason)
            return None
        logger.info("described %s for the cache of graphs in %.2f s", type(model).__name__, time.perf_counter() - started)
        return cls(entries, key, model, options, recurrent)

    @part("read a kept graph")
    def find(self) -> tuple[CompiledGraph, list[Any], Path] | None:
        """A graph, the flat inputs of its traced call, and its file; None if there is no usable one."""
        started = time.perf_counter()
        for path, record in self.entries.read(self.key):
            try:
                if (changed := self._changed(record["evidence"])) is not None:
                    logger.info("the graph %s is not used: %s has changed", path, changed)
                    continue
                found = restored(record, self.model, model_device(self.model), self.options, len(self.recurrent))
            except _UNUSABLE as error:
                what = f"{type(error).__name__}: {shown(str(error))}"
                logger.warning("the graph %s cannot be used: %s. The model is traced again.", path, what)
                continue
            if found is None:
                logger.info("the graph %s is not used: a compiled piece is gone", path)
                continue
            seconds = time.perf_counter() - started
            found[0].rewrite.seconds["loaded from disk"] = seconds
            logger.info("loaded the rewritten graph of %s from %s in %.2f s", type(self.model).__name__, path, seconds)
            return *found, path
        return None

    def keep(self, compiled: CompiledGraph, args: Sequence[Any]) -> Path | None:
        """Write a graph that has passed its self-check; None, with the reason logged, if it cannot be kept. `args`: the flat inputs of the
        traced call."""
        try:
            if compiled.files is None:
                raise Indescribable("a trace of which torch does not say what code it went through")
            owned = OwnedTensors(self.model)
            record = record_of(compiled, args, owned)
            evaluated = [index for index in compiled.rewrite.evaluated if compiled.roles[index] == "owned"]
            evidence = self._evidence(modules_of(compiled.files), [owned.path_of(args[index]) for index in evaluated])
        except Indescribable as reason:
            _not_kept(self.model, reason)
            return None
        name = hashlib.sha256(json.dumps(evidence).encode()).hexdigest()
        return self.entries.write(self.key, name, {"evidence": evidence, **record})

    def _evidence(self, modules: Sequence[str], tensors: Sequence[Sequence[str]]) -> Any:
        found = [(module, name, OwnedTensors.at(self.model, [module, name])) for module, name in tensors]
        if sum(tensor.nbytes for *_, tensor in found) > MOST_EVALUATED_BYTES:
            raise Indescribable(f"a proof on the values of more than {MOST_EVALUATED_BYTES >> 20} MiB")
        values = [[module, name, tensor_digest(tensor)] for module, name, tensor in found]
        return {"code": [[name, module_digest(name)] for name in modules], "tensors": values}

    def _changed(self, evidence: Any) -> str | None:
        """The part of the evidence that no longer holds; None if all of it does."""
        for name, digest in evidence["code"]:
            if module_digest(name) != digest:
                return f"the code or a value in {name}"
        for module, name, digest in evidence["tensors"]:
            if tensor_digest(OwnedTensors.at(self.model, [module, name])) != digest:
                return f"the tensor {name} of {module or 'the model'}"
        return None


def _not_kept(model: nn.Module, reason: Indescribable) -> None:
    logger.info("the graph of %s is not kept for the next process: %s cannot be told by a hash", type(model).__name__, reason)


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
