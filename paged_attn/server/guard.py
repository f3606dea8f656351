"""Before any route: the API key, the size of the body; and a count of the answers."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_attn.server.errors import ApiError


class Guard:
    """ASGI middleware. Bodies are read whole, up to the limit, before the app is called.

    Args:
        responded: told the path and status of every answer.
    """

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...], max_body_bytes: int, responded: Callable[[str, int], None]) -> None:
        self.app, self.max_body_bytes, self.responded = app, max_body_bytes, responded
        self.keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.responded(scope["path"], message["status"])
            await send(message)

        try:
            headers = dict(scope["headers"])
            self._check_key(scope["path"], headers.get(b"authorization", b""))
            body = await self._body(headers, receive)
        except ApiError as error:
            await error.response()(scope, receive, counting)
            return
        if body is not None:
            await self.app(scope, _again(body, receive), counting)

    def _check_key(self, path: str, authorization: bytes) -> None:
        if not self.keys or not path.startswith("/v1"):
            return
        scheme, _, key = authorization.partition(b" ")
        known = [secrets.compare_digest(key.strip(), each) for each in self.keys]
        if scheme.lower() != b"bearer" or not any(known):
            what = "the API key is not known to this server" if authorization else "no API key was sent"
            raise ApiError(401, f"{what}; send the header Authorization: Bearer KEY")

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body; None if the client left before its end."""
        declared = headers.get(b"content-length", b"0")
        self._check_size(int(declared) if declared.isdigit() else 0)
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            self._check_size(size)
            more = message.get("more_body", False)
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
