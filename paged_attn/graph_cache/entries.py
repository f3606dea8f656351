"""Records on disk: one file each, in a folder of the user's own, checked when it is read, and replaced as a whole."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paged_attn.attn_ops.private_files import RefusedFileError, make_private_folder, read_file
from paged_attn.capture.compiled_pieces.artifacts import VARIABLE, private_user_folder

logger = logging.getLogger("paged_attn")
MOST_BYTES = 64 << 20
MOST_TRIED = 8  # entries of one key, newest first: models that differ in tensors only, or in a file that was changed and changed back


class Entries:
    """A folder of files `<key>-<evidence>.graph`: a line with key and checksum, and then JSON. `folder`: is made when first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_user(cls) -> Entries | None:
        """The entries of the user (`private_user_folder`), or None if nothing is to be kept."""
        folder = private_user_folder("graphs")
        return None if folder is None else cls(folder)

    def read(self, key: str) -> Iterator[tuple[Path, Any]]:
        """The records of a key, newest first; what is damaged is left out with a warning."""
        for path in sorted(self.folder.glob(f"{key}-*.graph"), key=_age, reverse=True)[:MOST_TRIED]:
            try:
                head, _, body = read_file(path, MOST_BYTES, is_private=True).partition(b"\n")
            except RefusedFileError as error:
                logger.warning("a graph is not read: %s. The model is traced again.", error)
                continue
            except OSError as error:
                logger.info("the graph %s cannot be read: %s", path, error)
                continue
            if head.decode(errors="replace") != _head(key, body):
                logger.warning("the graph %s is damaged: its checksum is wrong. The model is traced again.", path)
                continue
            try:
                record = json.loads(body)
            except (ValueError, RecursionError) as error:
                logger.warning("the graph %s is not JSON: %s. The model is traced again.", path, error)
                continue
            yield path, record

    def write(self, key: str, evidence: str, record: Any) -> Path | None:
        """Write a record, in place of any other with the same evidence; None, with a warning, if the disk does not allow that."""
        body = json.dumps(record, separators=(",", ":")).encode()
        path = self.folder / f"{key}-{evidence[:16]}.graph"
        try:
            make_private_folder(self.folder)
            with tempfile.TemporaryDirectory(dir=self.folder, prefix="new-") as scratch:
                written = Path(scratch, "entry")
                written.touch(mode=0o600)
                written.write_bytes(_head(key, body).encode() + b"\n" + body)
                os.replace(written, path)  # atomic, even if other processes write it at the same time
        except OSError as error:
            logger.warning("a traced graph is not kept in %s: %s. Set %s to another folder, or to none.", self.folder, error, VARIABLE)
            return None
        return path

    def remove(self, path: Path) -> None:
        """Remove an entry that turned out to be unusable."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("the graph %s cannot be removed: %s", path, error)


def _head(key: str, body: bytes) -> str:
    return f"{key} {hashlib.sha256(key.encode() + body).hexdigest()}"


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process has removed it
        return 0.0
