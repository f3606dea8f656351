"""Waiting for a server that is another process."""

from __future__ import annotations

import re
import subprocess


def url_when_ready(server: subprocess.Popen[str]) -> str:
    """The address, once `paged-attn serve` has said on stderr (a pipe) that it is ready."""
    assert server.stderr is not None
    seen = ""
    while not (ready := re.search(r"ready on (http\S+) after", seen)):
        line = server.stderr.readline()
        assert line, seen
        seen += line
    return ready[1]
