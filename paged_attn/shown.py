"""Values in messages, shortened however large they are, and texts that cannot be printed there."""

from __future__ import annotations

import reprlib

MAX_SHOWN = 200  # characters

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 100, 100, 60


def shown(value: object) -> str:
    """As `repr`, but never long, and never made of the whole value."""
    text = _SHORT.repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def is_utf8(text: str) -> bool:
    """Whether there is no half of a surrogate pair in it, which JSON may write as an escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
