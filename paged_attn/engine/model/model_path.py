"""Whether a model is where it is said to be, found out before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

HINT = "Give a directory with config.json and safetensors, a GGUF file, or a hub id like 'org/name'"


def checked_model_path(path: str | Path, gguf_file: str | None = None) -> str:
    """The folder with its ~ written out, or a hub id as it is.

    Args:
        gguf_file: which file of the folder holds config, weights and tokenizer.

    Raises:
        ValueError: it looks like a folder, and is none that holds a model.
    """
    path, gguf_file = split_gguf(path, gguf_file)
    name = str(path)
    if not (isinstance(path, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1):
        return name
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ValueError(f"no model at {name!r}: not a directory. {HINT}")
    needed = gguf_file or "config.json"
    if not (folder / needed).is_file():
        raise ValueError(f"no model at {name!r}: it has no {needed}. {HINT}")
    return str(folder)


def split_gguf(path: str | Path, gguf_file: str | None = None) -> tuple[str | Path, str | None]:
    """(folder, file) for the path of a GGUF file; anything else as it is."""
    if gguf_file is None and str(path).endswith(".gguf"):
        file = Path(path).expanduser()
        return file.absolute().parent, file.name
    return path, gguf_file
