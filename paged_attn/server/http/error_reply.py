"""Errors, as /openapi.json describes them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """What every answer of status 400 and above is."""

    error: ErrorDetail


_STATUSES = {
    400: "the request can not be served as it is; the message says what to change", 401: "no API key, or an unknown one",
    404: "no such model or request", 405: "another method", 408: "the body was too slow",
    409: "requests use what was to go", 413: "the body is too large", 429: "too many requests; see Retry-After",
    499: "the request was cancelled by its id",
    500: "a step failed, or the server did", 503: "nothing is served now; see Retry-After", 504: "the request took too long",
}  # fmt: skip
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorReply, "description": what} for status, what in _STATUSES.items()}
ERRORS["default"] = {"model": ErrorReply, "description": "any other error"}  # else FastAPI adds a 422 of another form
