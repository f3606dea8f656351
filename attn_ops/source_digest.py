"""A hash of our own source files: caches on disk hold what these files made, and forget it when one of them changes."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent  # of paged_attn, through whose links our folders are found in a checkout, too


@functools.cache
def source_digest(*rooms: str) -> str:
    """A hash of all files in these folders of paged_attn, at any depth; "" means the files of paged_attn itself."""
    digest = hashlib.sha256()
    for room in rooms:
        folder = (_PACKAGE / room).resolve()  # rglob does not follow links
        for path in sorted(folder.rglob("*.py") if room else folder.glob("*.py")):
            digest.update(f"{room}/{path.relative_to(folder).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()
