"""Checks before any route: the caller, the size and shape of the body, and how long the body takes to arrive."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_attn.server.http.body_limits import BodyBudget, BodyShape, OpenBodies
from paged_attn.server.http.callers import Caller, Callers
from paged_attn.server.http.errors import ApiError, error_answer
from paged_attn.server.settings import ServerSettings
from paged_attn.shown import shown

# What limits of keys are about, and what needs a key, as all of /v1 does.
COUNTED = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/embeddings", "/v1/score", "/v1/rerank", "/tokenize", "/tokenizer_info", "/detokenize",
    "/score", "/rerank", "/v2/rerank",
)  # fmt: skip


class Guard:
    """ASGI middleware. Bodies are read whole, up to the limits, before the app is called; who sent it is `request.state.caller`.

    Args:
        responded: told the path and status of every answer.
        bodies: those that are still coming.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, responded: Callable[[str, int], None], bodies: OpenBodies) -> None:
        self.app, self.responded, self._bodies = app, responded, bodies
        self.max_body_bytes, self.body_seconds = int(settings.max_body_mib * 2**20), settings.body_seconds
        self.hosts = [host.lower() for host in settings.allow_hosts]
        self._callers, self._budget = Callers(settings), BodyBudget(int(settings.max_bodies_mib * 2**20))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.responded(scope["path"], message["status"])
            await send(message)

        with ExitStack() as afterwards:
            try:
                headers = dict(scope["headers"])
                if (encoding := headers.get(b"content-encoding", b"").strip()).lower() not in (b"", b"identity"):
                    given = shown(encoding.decode("latin-1"))
                    raise ApiError(415, f"the header Content-Encoding is {given}; bodies are read as they are: send JSON in UTF-8")
                self._check_host(scope["path"], headers.get(b"host", b""))
                is_api = scope["path"].startswith("/v1") or scope["path"] in COUNTED
                caller = self._callers.identify(headers, scope.get("client"), needs_key=is_api)
                scope.setdefault("state", {})["caller"] = caller
                if scope["path"] in COUNTED:
                    afterwards.enter_context(self._callers.counted(caller))
                body = await self._body(headers, receive, caller, afterwards)
            except ApiError as error:
                await error_answer(scope, error)(scope, receive, counting)
                return
            if body is not None:
                await self.app(scope, _again(body, receive), counting)

    def _check_host(self, path: str, header: bytes) -> None:
        """Other names than those of the server come from web pages that point their own name at it."""
        if not self.hosts or path.startswith("/health"):
            return
        host = header.decode("latin-1").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host  # without the port
        if not any(name == each or (each.startswith("*.") and name.endswith(each[1:])) for each in self.hosts):
            raise ApiError(
                400, f"the header Host is {shown(host)}; allowed: {', '.join(self.hosts)}; see --allow-host", code="unknown_host"
            )

    async def _body(self, headers: dict[bytes, bytes], receive: Receive, caller: Caller, afterwards: ExitStack) -> bytes | None:
        """The whole body; None if the client left before its end. What it takes of the budget is given back `afterwards`."""
        declared = headers.get(b"content-length", b"0")
        self._check_size(int(declared) if declared.isdigit() and len(declared) < 20 else self.max_body_bytes + 1)
        parts, size, more, shape = list[bytes](), 0, True, BodyShape()
        try:
            async with self._bodies.within(self.body_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part, more = message.get("body", b""), message.get("more_body", False)
                    self._check_size(size + len(part))
                    self._budget.take(caller.tenant, size, len(part))
                    afterwards.callback(self._budget.give_back, caller.tenant, len(part))
                    shape.feed(part)
                    parts.append(part)
                    size += len(part)
        except TimeoutError:
            if self._bodies.have_ended:
                raise ApiError(503, f"the server ends, and {size:,} bytes of the body have come; send it again, to another") from None
            raise ApiError(408, f"the body did not come within {self.body_seconds:g} s ({size:,} bytes did)") from None
        return b"".join(parts)

    def _check_size(self, size: int) -> None:
        if size > self.max_body_bytes:
            limit = f"{self.max_body_bytes / 2**20:g} MiB"
            raise ApiError(413, f"the body has {size} bytes or more; this server takes {limit}; see --max-body-mib")


def _again(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once and then what comes after it."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
