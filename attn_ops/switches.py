"""Words that switch a setting on or off in flags and environment variables."""

from __future__ import annotations

import os
from pathlib import Path

ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "no", "off")


def path_of_variable(name: str, default: Path) -> Path | None:
    """The path that an environment variable names; None if it is "none" or a word for off; `default` if it is unset or a word for on.

    To name a file or folder called "off", write ./off.
    """
    text = os.environ.get(name, "").strip()
    if text.lower() in (*OFF, "none"):
        return None
    return default if text.lower() in ("", *ON) else Path(text).expanduser()
