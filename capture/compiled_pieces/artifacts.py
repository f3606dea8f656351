"""Compiled pieces on disk, so that the next process need not compile them: one file each, checked and written atomically."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch

from paged_attn.attn_ops.private_files import RefusedFileError, check_private_folder, make_private_folder, read_file
from paged_attn.attn_ops.switches import path_of_variable

logger = logging.getLogger("paged_attn")

VARIABLE = "PAGED_ATTN_CACHE"
MOST_BYTES = 1 << 30
# What torch's loader raises for a file that it did not write or cannot use; most of its checks are assertions.
_UNUSABLE = (
    OSError, AssertionError, RuntimeError, ImportError, AttributeError, KeyError, TypeError, ValueError, EOFError, pickle.UnpicklingError,
)  # fmt: skip


class Artifact(Protocol):
    """What torch._inductor.standalone_compile returns."""

    def __call__(self, *args: Any) -> Any: ...

    def save(self, *, path: str, format: Literal["binary"]) -> None: ...


@dataclass(frozen=True)
class Compiled:
    """A compiled piece and the guards (`Sizes.guards`) under which it was compiled; if they are None, it serves no other piece."""

    run: Callable[..., Any]
    guards: str | None


class _Damaged(Exception):
    """An entry differs from what was written."""


def user_folder(kind: str) -> Path | None:
    """The folder for one kind of files in the cache that PAGED_ATTN_CACHE names (default: ~/.cache/paged_attn); None if it is off."""
    folder = path_of_variable(VARIABLE, Path("~/.cache/paged_attn").expanduser())
    return None if folder is None else folder / kind


def private_user_folder(kind: str) -> Path | None:
    """Like `user_folder`, but also None, with a warning, if anyone except the user can write there."""
    folder = user_folder(kind)
    if folder is not None:
        try:
            check_private_folder(folder)
        except OSError as error:
            logger.warning("no %s are read from %s or kept there: %s. Set %s to another folder, or to none.", kind, folder, error, VARIABLE)
            return None
    return folder


class ArtifactCache:
    """A folder of entries `<key>.piece`: a line of JSON and then torch's own format.

    Args:
        folder: created when first needed.
        load: makes a callable from a file in torch's format.
    """

    def __init__(self, folder: Path, load: Callable[[Path], Callable[..., Any]] | None = None) -> None:
        self.folder = folder
        self._load = load or _torch_load

    @classmethod
    def of_user(cls) -> ArtifactCache | None:
        """The user's artifacts (in `private_user_folder`), or None if nothing may be stored."""
        folder = private_user_folder("pieces")
        return None if folder is None else cls(folder)

    def load(self, key: str) -> Compiled | None:
        """The entry, or None if there is none or, with a warning, if it cannot be used."""
        path = self.folder / f"{key}.piece"
        if not path.exists():
            return None
        try:
            guards, body = _read(path, key)
            with tempfile.TemporaryDirectory(prefix="paged_attn-") as scratch:
                artifact = Path(scratch, "artifact")
                artifact.write_bytes(body)
                return Compiled(self._load(artifact), guards)
        except (_Damaged, RefusedFileError) as damage:
            reason = str(damage)
        except _UNUSABLE as error:
            reason = f"{type(error).__name__}: {error}"
        logger.warning("the compiled piece %s cannot be used: %s. It is compiled again.", path, reason)
        return None

    def save(self, key: str, artifact: Artifact, guards: str) -> bool:
        """Write an entry, replacing any other. Returns False, with the reason logged, if torch or the disk does not allow it."""
        try:
            make_private_folder(self.folder)
            with tempfile.TemporaryDirectory(dir=self.folder, prefix="new-") as scratch:
                written, entry = Path(scratch, "artifact"), Path(scratch, "entry")
                artifact.save(path=str(written), format="binary")
                body = written.read_bytes()
                header = {"key": key, "guards": guards, "checksum": _checksum(key, guards, body)}
                entry.touch(mode=0o600)
                entry.write_bytes(json.dumps(header).encode() + b"\n" + body)
                os.replace(entry, self.folder / f"{key}.piece")  # atomic, even if other processes write it at the same time
        except OSError as error:
            logger.warning("a compiled piece is not kept in %s: %s. Set %s to another folder, or to none.", self.folder, error, VARIABLE)
        except (RuntimeError, AssertionError) as error:  # torch: something in the piece cannot be serialized, or its caches are off
            logger.info("a compiled piece is not kept for the next process: torch cannot save it: %s", error)
        else:
            return True
        return False


def tagged(text: str) -> AbstractContextManager[None]:
    """Compile under a name in torch's own caches: by that name torch's loader takes an artifact from there without checking guards."""
    config: Any = torch.compiler.config  # torch adds `patch` to the module when it is imported
    tag = hashlib.sha256(text.encode()).hexdigest()
    return cast(AbstractContextManager[None], config.patch(cache_key_tag=config.cache_key_tag + tag))


def _torch_load(path: Path) -> Callable[..., Any]:
    from torch._inductor.standalone_compile import CompiledArtifact

    return CompiledArtifact.load(path=str(path), format="binary")


def _read(path: Path, key: str) -> tuple[str, bytes]:
    """Guards and artifact of an entry; raises OSError, or _Damaged if the file is not the entry of this key."""
    head, _, body = read_file(path, MOST_BYTES, is_private=True).partition(b"\n")
    try:
        header = json.loads(head)
        of_key, guards, checksum = (str(header[name]) for name in ("key", "guards", "checksum"))
    except (ValueError, KeyError, TypeError):
        raise _Damaged("it does not begin as an entry does") from None
    if of_key != key:
        raise _Damaged(f"it is the entry of another piece, {of_key[:12]}")
    if checksum != _checksum(key, guards, body):
        raise _Damaged("its checksum is wrong")
    return guards, body


def _checksum(key: str, guards: str, body: bytes) -> str:
    return hashlib.sha256(b"\n".join([key.encode(), guards.encode(), body])).hexdigest()
