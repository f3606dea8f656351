"""Writes the lines of a log in a separate thread, so that a terminal or pipe that nobody reads blocks nothing else."""

from __future__ import annotations

import queue
import threading
from typing import TextIO

MAX_WAITING = 10_000  # lines; more are dropped
CLOSE_SECONDS = 1.0


class LineWriter:
    """Writes lines to `out`, in order.

    Attributes:
        dropped: lines that found no room.
    """

    def __init__(self, out: TextIO) -> None:
        self.dropped = 0
        self._out = out
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="paged-attn-log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Never waits."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what waits, for a second at most."""
        try:
            self._lines.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._out.write(line + "\n")
                if self._lines.empty():
                    self._out.flush()
            except (OSError, ValueError):  # the reader has gone, or the file was closed
                self.dropped += 1
