"""Words that switch a setting on or off in flags and environment variables."""

from __future__ import annotations

import os
from pathlib import Path

ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "no", "off")


def path_of_variable(name: str, default: Path) -> Path | None:
    """The path that an environment variable names; None if it is a word for off, or "none"; `default` if it is unset or a word for on.

    A file or folder of such a name is meant by ./off.
    """
    text = os.environ.get(name, "").strip()
    if text.lower() in (*OFF, "none"):
        return None
    return default if text.lower() in ("", *ON) else Path(text).expanduser()
