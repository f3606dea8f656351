"""The server's settings, apart from the engine's."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paged_attn.chat.answers.reasoning import REASONING_PARSERS
from paged_attn.chat.formats.choose import TOOL_PARSERS

ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s]+")  # pages of apps and extensions have schemes of their own
HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?|\[[0-9A-Fa-f:.]+\]")


def _limit(default: float | None, help: str, *, at_least: int | None = None) -> Any:
    """A finite number, of at least so much or else above 0."""
    return field(default=default, metadata={"help": help, "at_least": at_least})


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server, checked on construction. Limits say below what they are; None turns one off.

    Attributes:
        model_name: the name of the model, or several; requests may give any of them, or that of an adapter. Answers have the first.
        host, port: where to listen; port 0 takes a free one. uds: a path to listen on instead, as a Unix socket.
        ssl_certfile, ssl_keyfile: PEM files, for HTTPS.
        api_keys: any of them opens /v1; none: /v1 is open. /health and /metrics always are. Each is a tenant of its own; on an open
            server each address is.
        share_prefixes: cached prefixes are shared between API keys.
        allow_origins: web pages of these origins may use the server from browsers (CORS); "*" is all.
        allow_hosts: what the header Host may say, "*.example.com" too; none: anything.
        allow_priority: whether requests may say how urgent they are.
        lora_folder: clients may load adapters that lie in this folder, and unload them; None: they may not.
        tool_parser, reasoning_parser: how answers of chats are read; see `ChatRequest`.
        log_requests: a line of JSON on stdout for each request.
        otlp_endpoint: where OpenTelemetry traces go, such as http://localhost:4318/v1/traces.

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
    max_queue: int = _limit(
        1024, "requests that may wait beyond those that run; keys share them equally when they are taken", at_least=0
    )  # more get 429
    max_requests_per_key: int | None = _limit(
        None,
        "HTTP requests of one API key (without keys: address) that run or wait at the same time, each with as many prompts as it has",
        at_least=1,
    )
    requests_per_minute_per_key: int | None = _limit(None, "of one API key (without keys: address)", at_least=1)
    queue_seconds: float | None = _limit(None, "how long a request may wait before it begins; then 503")
    request_seconds: float | None = _limit(
        None, "how long a request may take in all; then 504. Requests may ask for less (timeout_seconds)"
    )
    max_body_mib: float = _limit(16.0, "largest body of a request")  # larger ones get 413
    max_bodies_mib: float = _limit(256.0, "bodies of all requests at the same time")  # more get 429
    max_connections: int = _limit(2048, "connections at the same time", at_least=1)  # more get 503
    header_seconds: float = _limit(10.0, "how long a client may take to send the headers of a request")
    body_seconds: float = _limit(60.0, "how long a client may take to send a body")
    write_seconds: float = _limit(60.0, "how long a client may read nothing of what it is sent")
    allow_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    drain_seconds: float = _limit(30.0, "how long running requests may go on after SIGTERM or Ctrl-C", at_least=0)  # then they end
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
        for limit in LIMITS:
            value, least = getattr(self, limit.name), limit.metadata["at_least"]
            if value is not None and not ((value > 0 if least is None else value >= least) and value < math.inf):
                allowed = "above 0" if least is None else f"of at least {least}"
                raise ValueError(f"{limit.name} is {value}; allowed are finite values {allowed}")
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


LIMITS = tuple(setting for setting in fields(ServerSettings) if setting.metadata)


def _is_web(url: str) -> bool:
    """Whether this is an http or https URL with a host, and a port that can be one."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not any(c.isspace() for c in url)
    except ValueError:
        return False
