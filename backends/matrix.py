"""The support matrix: what each registered backend can run, generated from its `Capabilities`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from paged_attn.backends.capabilities import ANY_SIZE, Capabilities, Feature, Requirement
from paged_attn.backends.registry import backend_class, backend_names
from paged_attn.backends.table import markdown_table, text_table

HEADERS = ("Backend", "Devices", "Dtypes", "KV dtypes", "Page sizes", "Head dims", "Group sizes", "Features", "Graphs", "Needs", "Here")


@dataclass(frozen=True)
class MatrixRow:
    """One backend in words, a field per column of HEADERS; `here` starts with "yes" or "no"."""

    backend: str
    devices: str
    dtypes: str
    kv_dtypes: str
    page_sizes: str
    head_dims: str
    group_sizes: str
    features: str
    graphs: str
    needs: str
    here: str

    @classmethod
    def of(cls, name: str, capabilities: Capabilities) -> MatrixRow:
        architectures = ", ".join(f"SM{a}" for a in sorted(capabilities.architectures))
        return cls(
            backend=name,
            devices=_listed(capabilities.devices) + (f" ({architectures})" if architectures else ""),
            dtypes=_listed(str(dtype).removeprefix("torch.") for dtype in capabilities.dtypes),
            kv_dtypes=_listed(str(dtype).removeprefix("torch.") for dtype in capabilities.kv_dtypes),
            page_sizes=_sizes(capabilities.page_sizes),
            head_dims=_sizes(capabilities.head_dims),
            group_sizes=_sizes(capabilities.group_sizes),
            features=_listed(map(feature_word, capabilities.features)) or "none",
            graphs=", ".join(f"{phase}: {support.value}" for phase, support in capabilities.graphs.items()),
            needs=", ".join(map(_requirement, capabilities.requirements)) or "nothing",
            here=available_here(capabilities),
        )

    @property
    def cells(self) -> list[str]:
        return [str(value) for value in vars(self).values()]


def matrix_rows() -> list[MatrixRow]:
    """All registered backends, in the order in which "auto" prefers them."""
    return [MatrixRow.of(name, backend_class(name).capabilities) for name in backend_names()]


def matrix_text(width: int = 100) -> str:
    """For a terminal: one table of what runs where, one of limits and features, and what the feature words mean."""
    rows = [row.cells for row in matrix_rows()]
    tables = []
    for names in (
        ("Backend", "Here", "Devices", "Graphs", "Needs"),
        ("Backend", "Dtypes", "KV dtypes", "Page sizes", "Head dims", "Group sizes"),
        ("Backend", "Features"),
    ):
        columns = [HEADERS.index(name) for name in names]
        tables.append(text_table(names, [[row[i] for i in columns] for row in rows], width))
    legend = "\n".join(f"  {word:<15}{meaning}" for word, meaning in _legend())
    return "\n\n".join([*tables, f"Features:\n{legend}"])


def matrix_markdown() -> str:
    """For the documentation: the same on every machine, and so without the column "Here"."""
    rows = [row.cells[:-1] for row in matrix_rows()]
    legend = "\n".join(f"- `{word}`: {meaning}" for word, meaning in _legend())
    return f"{markdown_table(HEADERS[:-1], rows)}\n\n{legend}"


def available_here(capabilities: Capabilities) -> str:
    """`yes: cpu, cuda` with the devices of this machine that it can use, or `no: ` and every reason."""
    reasons = [f"needs {_requirement(r)}: {r.install}" for r in capabilities.requirements if importlib.util.find_spec(r.module) is None]
    present = {"cpu"} | ({"cuda"} if torch.cuda.is_available() else set())
    usable = capabilities.devices & present
    if not usable:
        reasons.append(f"runs on {_listed(capabilities.devices)}; this machine has {_listed(present)}")
    elif usable == {"cuda"} and capabilities.architectures:
        found = {major * 10 + minor for major, minor in map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))}
        if not found & capabilities.architectures:
            reasons.append(f"no GPU with {_listed(f'SM{a}' for a in capabilities.architectures)}; found {_listed(f'SM{a}' for a in found)}")
    return f"no: {'; '.join(reasons)}" if reasons else f"yes: {_listed(usable)}"


def feature_word(feature: Feature) -> str:
    """`FP8_KV` -> "fp8-kv"."""
    return feature.name.lower().replace("_", "-")


def _legend() -> list[tuple[str, str]]:
    return [(feature_word(feature), feature.value) for feature in Feature]


def _requirement(requirement: Requirement) -> str:
    version = requirement.version
    return f"{requirement.module} {version}".strip()


def _sizes(allowed: object) -> str:
    return "any" if allowed == ANY_SIZE else str(allowed)


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(words))
