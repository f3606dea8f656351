"""The command that installs one of our extras, depending on where this installation came from. No index has a release yet."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from packaging.requirements import Requirement

NAME = "paged-attn"


@functools.cache
def install_line(extra: str) -> str:
    """`pip install -e '/home/me/paged_attn[serve]'` in a checkout; else with the folder, wheel or repository that this installation came
    from; if that is unknown or gone, with the extra's requirements."""
    root = Path(__file__).parent.parent.resolve().parent  # the folder that holds the package `paged_attn`
    if _is_checkout(root):
        return f"pip install -e '{root}[{extra}]'"
    try:
        installed = importlib.metadata.distribution(NAME)
    except importlib.metadata.PackageNotFoundError:
        return f"pip install '.[{extra}]' in a checkout of {NAME}"
    source = _source(json.loads(installed.read_text("direct_url.json") or "{}"), extra)
    return f"pip install {source}" if source else f"pip install {' '.join(_parts(installed.requires or [], extra))}"


def _is_checkout(root: Path) -> bool:
    project = root / "pyproject.toml"
    return project.is_file() and f'name = "{NAME}"' in project.read_text(encoding="utf-8")


def _source(origin: dict[str, Any], extra: str) -> str | None:
    """pip's argument for what this package was installed from, as pip recorded it (PEP 610)."""
    url = str(origin.get("url", ""))
    if "vcs_info" in origin:
        return f"'{NAME}[{extra}] @ {origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}'"
    place = Path(unquote(urlparse(url).path))
    if not url.startswith("file:") or not place.exists():
        return None
    return f"'{place}[{extra}]'" if "dir_info" in origin else f"'{NAME}[{extra}] @ {url}'"


def _parts(requires: list[str], extra: str) -> list[str]:
    """The requirements of an extra, including those of extras that it lists."""
    found = []
    for each in map(Requirement, requires):
        if each.marker is None or not each.marker.evaluate({"extra": extra}) or each.marker.evaluate({"extra": ""}):
            continue
        if each.name == NAME:
            found += [part for inner in sorted(each.extras) for part in _parts(requires, inner)]
        else:
            found.append(f"'{each.name}{each.specifier}'")
    return found
