"""The JSON of an error: OpenAI's, and Anthropic's on the routes of its API."""

from __future__ import annotations

from typing import Any, Protocol

MESSAGES = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
NO_THREADS = "thread_unsupported_request"
ANTHROPIC_CODES = (NO_THREADS,)  # those of Anthropic's own that its client acts on


class Told(Protocol):
    """What a client sees of an `ApiError`."""

    status: int
    message: str
    type: str
    param: str | None
    code: str | None


def payload(error: Told, path: str) -> dict[str, Any]:
    """What a client of this path reads."""
    is_anthropics = path == MESSAGES or path.startswith(f"{MESSAGES}/")
    return anthropic_payload(error) if is_anthropics else openai_payload(error)


def openai_payload(error: Told) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def anthropic_payload(error: Told) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {"details": {"error_code": error.code}} if error.code in ANTHROPIC_CODES else {}
    return {"type": "error", "error": {"type": kind, "message": error.message, **details}}
