"""Whether a model is where it is said to be, found out before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

HINT = "Give a directory with config.json and safetensors, a GGUF file, or a hub id like 'org/name'"


def checked_model_path(path: str | Path, gguf_file: str | None = None) -> tuple[str, str | None]:
    """(the folder with its ~ written out, or a hub id as it is; the GGUF file in it, if that is where config, weights and tokenizer are).

    Args:
        path: also that of a GGUF file itself.

    Raises:
        ValueError: it looks like a folder, and is none that holds a model.
    """
    if gguf_file is None and str(path).endswith(".gguf"):
        file = Path(path).expanduser().absolute()
        path, gguf_file = file.parent, file.name
    name = str(path)
    if not (isinstance(path, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1):
        return name, gguf_file
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ValueError(f"no model at {name!r}: not a directory. {HINT}")
    needed = gguf_file or "config.json"
    if not (folder / needed).is_file():
        raise ValueError(f"no model at {name!r}: it has no {needed}. {HINT}")
    return str(folder), gguf_file
