"""Texts that cannot be written in UTF-8, which JSON and Python can hold."""

from __future__ import annotations


def is_utf8(text: str) -> bool:
    """Whether there is no half of a surrogate pair in it, which JSON may write as an escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
