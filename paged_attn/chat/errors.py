"""Errors of a chat."""

from __future__ import annotations

from typing import Any

from paged_attn.shown import shown


class RequestError(ValueError):
    """What a caller gave cannot be served.

    Args:
        param: the argument, or the field of a body, that is at fault, such as `messages.0.role`.
        code: a word for programs, if there is one.
    """

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code

    def __reduce__(self) -> tuple[Any, ...]:  # another process's pool would break at one that it cannot read
        return type(self), (str(self), self.param, self.code), self.__dict__


class ChatError(RequestError):
    """Messages, tools or settings of a chat that cannot be served."""


def not_allowed(param: str, got: object, allowed: str) -> ChatError:
    """For one value of a chat."""
    return ChatError(f"{param}: got {shown(got)}; allowed: {allowed}", param)
