"""Turns errors into answers in the form that clients of the path expect, OpenAI's or Anthropic's, and describes them for /openapi.json."""

from __future__ import annotations

import json
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from paged_attn.asynchronous.errors import TOO_LONG, NotServingError, QueueFullError, QueueTimeoutError, ServingError, without_backtrace
from paged_attn.chat.errors import RequestError
from paged_attn.engine.model.model_limits import PromptTooLongError
from paged_attn.shown import shown

MESSAGES = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
NO_THREADS = "thread_unsupported_request"
ANTHROPIC_CODES = (NO_THREADS,)  # those of Anthropic's own that its client acts on
TYPES = {401: "authentication_error", 429: "rate_limit_error"}
CODES = {
    401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 408: "body_too_slow", 413: "body_too_large",
    415: "body_compressed", 429: "queue_full",
}  # fmt: skip
CLIENT_GONE = 499
STATUSES = {NotServingError: 503, QueueFullError: 429, QueueTimeoutError: 503}  # any other engine error: 500
MAX_MESSAGE, MAX_PARAM = 1000, 100  # characters


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """What every answer of status 400 and above is."""

    error: ErrorDetail


class AnthropicDetails(BaseModel):
    error_code: str


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str
    details: AnthropicDetails | None = None


class AnthropicErrorReply(BaseModel):
    """The same on the routes of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicErrorDetail


_DESCRIPTIONS: dict[int | str, str] = {
    400: "the request cannot be served as it is; the message says what to change", 401: "no API key, or an unknown one",
    404: "no such model or request", 405: "another method", 408: "the body was too slow",
    409: "requests use what was to go", 413: "the body is too large", 415: "the body is compressed",
    429: "too many requests; see Retry-After", 499: "the request was cancelled by its id",
    500: "a step failed, or the server did", 503: "nothing is served now; see Retry-After", 504: "the request took too long",
    "default": "any other error",  # otherwise FastAPI adds a 422 of another form
}  # fmt: skip
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorReply, "description": what} for status, what in _DESCRIPTIONS.items()}
ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {status: {**error, "model": AnthropicErrorReply} for status, error in ERRORS.items()}


class ApiError(Exception):
    """An answer with an error status.

    Args:
        message: cut after `MAX_MESSAGE` characters, and before a backtrace.
        param: the field of the body that is at fault.
        retry_after: seconds, for statuses after which a client should come back.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, _cut(without_backtrace(message), MAX_MESSAGE), retry_after
        self.param = None if param is None else _cut(param, MAX_PARAM)
        self.code = code if code is not None else CODES.get(status)
        self.type = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")

    def response(self, path: str = "") -> Response:
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after is not None else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status == 504:
            headers["x-should-retry"] = "false"  # OpenAI's clients would send it twice more
        # ASCII: a message may quote a lone surrogate, which UTF-8 cannot carry.
        return Response(json.dumps(payload(self, path)), self.status, headers, "application/json")


def payload(error: ApiError, path: str) -> dict[str, Any]:
    """What a client of this path reads."""
    is_anthropics = path == MESSAGES or path.startswith(f"{MESSAGES}/")
    return anthropic_payload(error) if is_anthropics else openai_payload(error)


def openai_payload(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def anthropic_payload(error: ApiError) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {"details": {"error_code": error.code}} if error.code in ANTHROPIC_CODES else {}
    return {"type": "error", "error": {"type": kind, "message": error.message, **details}}


def bad_field(field: str, what: str, part: str = "") -> ApiError:
    """400 with what is wrong with a field of the body, or with a part of it."""
    return ApiError(400, f"{field}{part}: {what}", param=field)


def not_allowed(field: str, got: object, allowed: str) -> ApiError:
    """400 for a value of a field of the body."""
    return bad_field(field, f"got {shown(got)}; allowed: {allowed}")


def bad_request(error: Exception, param: str | None = None) -> ApiError:
    """400 with the engine's own words."""
    code = TOO_LONG if isinstance(error, PromptTooLongError) else None
    return ApiError(400, " ".join([str(error), *getattr(error, "__notes__", ())]), param=param, code=code)


def api_error(error: Exception) -> ApiError:
    """What the engine's side raised, as an answer."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ServingError):
        status = next((each for kind, each in STATUSES.items() if isinstance(error, kind)), 500)
        return ApiError(400 if error.code == "guide_failed" else status, str(error), code=error.code, retry_after=error.retry_after)
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    return bad_request(error)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


LISTED = "; what this server answers is listed at /docs"
WAY = "; a client's base URL is http://host:port/v1; all routes are listed at /docs"
LORAS = "; clients load and unload adapters where the server was started with --lora-folder DIR"
BATCHES = "; this server takes no batches: `paged-attn run-batch MODEL -i FILE -o FILE` answers a file of requests, or send them one by one"
STORED = "; this server stores no answers: send the whole conversation each time"
# What clients know from OpenAI's or Anthropic's API, by the beginning of its path, and what to do instead.
NOT_HERE = {
    "/v1/load_lora_adapter": LORAS, "/v1/unload_lora_adapter": LORAS, "/v1/batches": BATCHES, "/v1/messages/batches": BATCHES,
    "/v1/files": "; this server stores no files: put their text into the request", "/v1/responses/": STORED, "/v1/conversations": STORED,
}  # fmt: skip


def _way(path: str) -> str:
    """What to do about a path that there is not."""
    hint = next((hint for start, hint in NOT_HERE.items() if path.startswith(start)), None)
    if hint is not None:
        return hint
    return LISTED if path.startswith("/v1/") else WAY


def add_handlers(app: FastAPI) -> None:
    """Every error that the app can end in gets OpenAI's form."""
    for kind in (ApiError, ServingError, RequestError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer)


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        return error_answer(request.scope, _first_complaint(error))
    if isinstance(error, HTTPException):
        hint, headers = _way(request.url.path) if error.status_code == 404 else "", error.headers or {}
        if isinstance(error.__cause__, ValueError):  # raised by FastAPI while it reads the body
            hint = f": {error.__cause__}"
        if allowed := headers.get("Allow"):
            hint = f"; allowed: {allowed}"
        answer = error_answer(
            request.scope, ApiError(error.status_code, f"{request.method[:20]} {shown(request.url.path)}: {error.detail}{hint}")
        )
        answer.headers.update(headers)
        return answer
    return error_answer(request.scope, api_error(error))


def error_answer(scope: Scope, error: ApiError) -> Response:
    """The answer; the log of the call knows of it, too."""
    call = scope.get("state", {}).get("call")
    if call is not None and call.failure is None:
        call.failure = error
    # Anthropic's client asks for models and files, too, on paths that both APIs have.
    return error.response(MESSAGES if "anthropic-version" in Headers(scope=scope) else scope.get("path", ""))


def _first_complaint(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
    where = ".".join(str(part) for part in first["loc"][1:])
    if not where:
        return ApiError(400, "the body is not a JSON object, or came without the header Content-Type: application/json; send both")
    if first["type"] == "extra_forbidden":
        return unknown_field(where)
    got = "" if first["type"] == "missing" else f"; got {shown(first.get('input'))}"
    return bad_field(where, f"{first['msg']}{got}")


def unknown_field(where: str, instead: str = "") -> ApiError:
    hint = instead or "this server does not support it"
    return ApiError(400, f"unknown field {shown(where)}; {hint}", param=where, code="unknown_field")


def unforeseen(error: Exception) -> ApiError:
    """The words of what nobody foresaw are for the log, and not for clients."""
    what = f"the server failed: {type(error).__name__}; its log says why, under the x-request-id of this answer"
    return ApiError(500, what, code="internal_error")
