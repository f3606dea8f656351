"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

TYPES = {401: "authentication_error", 429: "rate_limit_error"}
CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 429: "queue_full"}
CLIENT_GONE = 499
SHOWN_INPUT = 100


class ApiError(Exception):
    """An answer with an error status.

    Args:
        param: the field of the body that is at fault.
        retry_after: seconds, for statuses after which a client should come back.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = status, message, param, retry_after
        self.code = code if code is not None else CODES.get(status)
        self.type = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")

    def payload(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after is not None else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        # ASCII: a message may quote a lone surrogate, which UTF-8 can not carry.
        return Response(json.dumps(self.payload()), self.status, headers, "application/json")


def bad_request(error: Exception, param: str | None = None) -> ApiError:
    """400 with the engine's own words."""
    return ApiError(400, "\n".join([str(error), *getattr(error, "__notes__", ())]), param=param)


def add_handlers(app: FastAPI) -> None:
    """Every error that the app can end in gets OpenAI's form."""
    app.add_exception_handler(ApiError, _own)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unforeseen)


async def _own(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _invalid(_: Request, error: Exception) -> Response:
    """The first complaint about the body, with what it is about."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}").response()
    where = ".".join(str(part) for part in first["loc"][1:])
    if not where:
        hint = "send a JSON object with the header Content-Type: application/json"
        return ApiError(400, f"the body is not a JSON object: {first['msg']}; {hint}").response()
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {where!r}; this server does not support it", param=where, code="unknown_field").response()
    got = "" if first["type"] == "missing" else f"; got {_short(first.get('input'))}"
    return ApiError(400, f"{where}: {first['msg']}{got}", param=where).response()


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()


async def _unforeseen(_: Request, error: Exception) -> Response:
    return ApiError(500, f"the server failed: {type(error).__name__}: {error}").response()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_INPUT else f"{text[:SHOWN_INPUT]}..."
