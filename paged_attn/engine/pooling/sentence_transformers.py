"""How a sentence-transformers folder says that its model embeds: modules.json, and the config of its pooling."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.engine.requests.pooled_rows import PoolingKind

_MODES: dict[str, PoolingKind] = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last", "cls": "cls", "mean": "mean"}
_KNOWN = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class EmbeddingDefaults:
    """How a checkpoint embeds unless a caller says otherwise."""

    pooling: PoolingKind | None = None
    normalize: bool = True


def embedding_defaults(name: str, revision: str | None = None) -> EmbeddingDefaults | None:
    """None where the directory or hub repository has no modules.json. Raises UnsupportedError: it has modules that are not known (a dense
    layer, other poolings); says which."""
    modules = _read(name, "modules.json", revision)
    if modules is None:
        return None
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if unknown := [kind for kind in kinds if kind not in _KNOWN]:
        raise UnsupportedError(
            f"{name!r}: its modules.json puts {unknown[0]} behind the model; known are {', '.join(_KNOWN)}. sentence-transformers runs it"
        )
    pooling = None
    for module, kind in zip(modules, kinds, strict=True):
        if kind == "Pooling":
            path = f"{module.get('path', '')}/config.json".lstrip("/")
            pooling = _mode(name, _read(name, path, revision) or {})
    return EmbeddingDefaults(pooling, "Normalize" in kinds)


def has_modules(name: str, revision: str | None = None) -> bool:
    """Whether the directory or hub repository is one of sentence-transformers."""
    return _read(name, "modules.json", revision) is not None


def _mode(name: str, config: dict[str, Any]) -> PoolingKind:
    """Old files have a field of each mode, newer ones one field for all."""
    prefix = "pooling_mode_"
    modes = [key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value is True]
    modes = modes or [str(config.get("pooling_mode"))]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedError(
            f"{name!r}: the config of its pooling asks for {' and '.join(modes)}; known is one of {', '.join(_MODES)}. "
            "sentence-transformers runs it"
        )
    return _MODES[modes[0]]


def _read(name: str, file: str, revision: str | None) -> Any:
    from transformers.utils.hub import cached_file

    path = cached_file(
        name, file, revision=revision, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )  # fmt: skip
    if path is None:
        return None
    with open(path, encoding="utf-8") as text:
        return json.load(text)
