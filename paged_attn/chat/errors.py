"""What is wrong with a chat."""

from __future__ import annotations


class ChatError(ValueError):
    """Messages, tools or settings of a chat that can not be served.

    Args:
        param: which of them is at fault, such as `messages.0.role`.
        code: a word for programs, if there is one.
    """

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code
