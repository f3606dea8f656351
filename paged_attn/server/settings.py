"""The server's settings, apart from the engine's."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from paged_attn.chat.answers.reasoning import REASONING_PARSERS
from paged_attn.chat.formats.choose import TOOL_PARSERS

AT_LEAST = {"max_queue": 0, "max_connections": 1, "max_requests_per_key": 1, "requests_per_minute_per_key": 1, "drain_seconds": 0}
ABOVE_0 = ("max_body_mib", "max_bodies_mib", "queue_seconds", "request_seconds", "header_seconds", "body_seconds", "write_seconds")

ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s]+")  # pages of apps and extensions have schemes of their own
HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?|\[[0-9A-Fa-f:.]+\]")


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server, checked on construction. None turns a limit off.

    Attributes:
        model_name: the name of the model, or several; requests may give any of them, or that of an adapter. Answers have the first.
        host, port: where to listen; port 0 takes a free one. uds: a path to listen on instead, as a Unix socket.
        ssl_certfile, ssl_keyfile: PEM files, for HTTPS.
        api_keys: any of them opens /v1; none: /v1 is open. /health and /metrics always are. Each is a tenant of its own; on an open
            server each address is.
        share_prefixes: cached prefixes are shared between API keys.
        max_queue: requests (prompts) that may wait beyond those that run; more get 429. Tenants share it equally when it is full.
        max_requests_per_key: HTTP requests of one tenant that run or wait at the same time, each with as many prompts as it has.
        requests_per_minute_per_key: of one tenant, as many at once and then one after the other.
        queue_seconds: how long a request may wait before it begins to run; then 503.
        request_seconds: how long it may take in all; then 504. Requests may ask for less.
        max_body_mib: larger bodies get 413. max_bodies_mib: of all requests at the same time; more get 429.
        max_connections: connections at the same time; more get 503.
        header_seconds, body_seconds: how long a client may take to send its headers, and its body.
        write_seconds: how long a client may read nothing of what it is sent.
        allow_origins: web pages of these origins may use the server from browsers (CORS); "*" is all.
        allow_hosts: what the header Host may say, "*.example.com" too; none: anything.
        allow_priority: whether requests may say how urgent they are.
        lora_folder: clients may load adapters that lie in this folder, and unload them; None: they may not.
        tool_parser, reasoning_parser: how answers of chats are read; see `ChatRequest`.
        log_requests: a line of JSON on stdout for each request.
        otlp_endpoint: where OpenTelemetry traces go, such as http://localhost:4318/v1/traces.
        drain_seconds: how long running requests may go on after a shutdown began; then they are cancelled.

    Raises:
        ValueError: a value out of range, named.
    """

    model_name: str | tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    api_keys: tuple[str, ...] = ()
    share_prefixes: bool = False
    max_queue: int = 1024
    max_requests_per_key: int | None = None
    requests_per_minute_per_key: int | None = None
    queue_seconds: float | None = None
    request_seconds: float | None = None
    max_body_mib: float = 16.0
    max_bodies_mib: float = 256.0
    max_connections: int = 2048
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    write_seconds: float = 60.0
    allow_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    drain_seconds: float = 30.0
    allow_priority: bool = False
    lora_folder: str | None = None
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    log_requests: bool = False
    otlp_endpoint: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the model, each once."""
        return tuple(dict.fromkeys((self.model_name,) if isinstance(self.model_name, str) else self.model_name))

    @property
    def first_name(self) -> str:
        """What answers call the model."""
        return self.names[0]

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise ValueError("model_name is empty; clients name the model by it")
        if self.lora_folder is not None and not Path(self.lora_folder).is_dir():
            raise ValueError(f"lora_folder is {self.lora_folder!r}, which is not a folder; give the one that adapters may be loaded from")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; allowed are 0 (any free port) to 65535")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile is given without ssl_certfile; give both, or a certificate's file that holds the key, too")
        for name, known in (("tool_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed are {', '.join(known)}")
        for name, low in (AT_LEAST | dict.fromkeys(ABOVE_0, 0)).items():
            value = getattr(self, name)
            if value is not None and not (low <= value < math.inf and (value > 0 or name in AT_LEAST)):
                raise ValueError(f"{name} is {value}; allowed are finite values {'of at least' if name in AT_LEAST else 'above'} {low}")
        if self.max_bodies_mib < 2 * self.max_body_mib:  # a client holds as much as it leaves free
            allowed = f"allowed are values of at least twice max_body_mib ({self.max_body_mib:g}), {2 * self.max_body_mib:g}"
            raise ValueError(f"max_bodies_mib is {self.max_bodies_mib:g}; {allowed}")
        if self.otlp_endpoint is not None and not _is_web(self.otlp_endpoint):
            raise ValueError(f"otlp_endpoint is {self.otlp_endpoint!r}; allowed is a URL such as http://localhost:4318/v1/traces")
        for origin in self.allow_origins:
            if not ORIGIN.fullmatch(origin):
                raise ValueError(f"allow_origins has {origin!r}; allowed are origins as browsers send them, https://example.com, or *")
        for host in self.allow_hosts:
            if not HOST.fullmatch(host):
                raise ValueError(f"allow_hosts has {host!r}; allowed are names without scheme and port, example.com or *.example.com")
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in self.api_keys):
            raise ValueError("an API key is empty or holds spaces or characters other than printable ASCII, so that no header can carry it")


def _is_web(url: str) -> bool:
    """Whether this is an http or https URL with a host, and a port that can be one."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not any(c.isspace() for c in url)
    except ValueError:
        return False
