"""Whether a model is where it is said to be, found out before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path


def checked_model_path(path: str | Path) -> str:
    """The folder with its ~ written out, or a hub id as it is.

    Raises:
        ValueError: it looks like a folder, and is none that holds a model.
    """
    name = str(path)
    if not (isinstance(path, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1):
        return name
    folder = Path(name).expanduser()
    hint = "Give a directory with config.json and safetensors, or a hub id like 'org/name'"
    if not folder.is_dir():
        raise ValueError(f"no model at {name!r}: not a directory. {hint}")
    if not (folder / "config.json").is_file():
        raise ValueError(f"no model at {name!r}: it has no config.json. {hint}")
    return str(folder)
