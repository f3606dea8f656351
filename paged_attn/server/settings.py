"""What the server is told, apart from the engine's settings."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server, checked on construction.

    Attributes:
        model_name: the one model name that requests may give.
        host, port: where to listen; port 0 takes a free one.
        api_keys: any of them opens /v1; none: /v1 is open. /health and /metrics always are.
        max_queue: requests (prompts) that may wait beyond those that run; more get 429.
        max_body_mib: larger bodies get 413.
        allow_priority: whether requests may say how urgent they are.
        drain_seconds: how long running requests may go on after a shutdown began; then they are cancelled.

    Raises:
        ValueError: a value out of range, named.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_queue: int = 1024
    max_body_mib: float = 16.0
    drain_seconds: float = 30.0
    allow_priority: bool = False

    def __post_init__(self) -> None:
        if not self.model_name:
            raise ValueError("model_name is empty; clients name the model by it")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; allowed are 0 (any free port) to 65535")
        if self.max_queue < 0:
            raise ValueError(f"max_queue is {self.max_queue}; allowed are values of at least 0")
        if not 0 < self.max_body_mib < math.inf:
            raise ValueError(f"max_body_mib is {self.max_body_mib}; allowed are finite values above 0")
        if not 0 <= self.drain_seconds < math.inf:
            raise ValueError(f"drain_seconds is {self.drain_seconds}; allowed are finite values of at least 0")
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in self.api_keys):
            raise ValueError("an API key is empty or holds spaces or characters other than printable ASCII, so that no header can carry it")

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * 2**20)
