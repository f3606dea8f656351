"""The support matrix: what each backend of attention, of experts and of scans can run, generated from their capabilities."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields

from paged_attn.backends.attention.capabilities import ANY_SIZE, PHASES, Capabilities, Feature
from paged_attn.backends.devices import devices_here
from paged_attn.backends.needs import Needs, Requirement, architecture_words, names_of, short_dtype
from paged_attn.backends.scans.base import OPS
from paged_attn.backends.selection.experts import BUILT_IN as EXPERTS
from paged_attn.backends.selection.experts import experts_backend
from paged_attn.backends.selection.packages import requirement_words, why_unmet
from paged_attn.backends.selection.registry import backend_class, backend_names
from paged_attn.backends.selection.scans import BUILT_IN as SCANS
from paged_attn.backends.selection.scans import scans_backend

HEADERS = (
    "Backend", "Devices", "Phases", "Dtypes", "KV dtypes", "Page sizes", "Head dims", "Group sizes", "Features", "Graphs", "Needs", "Note",
    "Here",
)  # fmt: skip
EXPERTS_HEADERS = ("Backend", "Devices", "Dtypes", "Needs", "Note", "Here")
SCANS_HEADERS = ("Backend", "Ops", *EXPERTS_HEADERS[1:])
PAIRS = "Two names are one backend for prefill and one for decode: backend='fa3,flashinfer'."
GAP = "  "


@dataclass(frozen=True)
class MatrixRow:
    """One backend in words, a field per column of HEADERS; `here` starts with "yes" or "no"."""

    backend: str
    devices: str
    phases: str
    dtypes: str
    kv_dtypes: str
    page_sizes: str
    head_dims: str
    group_sizes: str
    features: str
    graphs: str
    needs: str
    note: str
    here: str

    @classmethod
    def of(cls, name: str, capabilities: Capabilities) -> MatrixRow:
        devices, dtypes, needs, note, here = _needs_cells(capabilities)
        conflicts = ("not " + " with ".join(sorted(map(feature_word, group))) for group in capabilities.conflicts)
        return cls(
            backend=name,
            devices=devices,
            phases="both" if capabilities.phases == PHASES else f"{names_of(capabilities.phases)} only",
            dtypes=dtypes,
            kv_dtypes=names_of(map(short_dtype, capabilities.kv_dtypes)),
            page_sizes=_sizes(capabilities.page_sizes),
            head_dims=", ".join(_head_dims(capabilities)),
            group_sizes=_sizes(capabilities.group_sizes),
            features="; ".join([names_of(map(feature_word, capabilities.features)) or "none", *sorted(conflicts)]),
            graphs=", ".join(f"{phase}: {support.value}" for phase, support in capabilities.graphs.items()),
            needs=needs,
            note=note,
            here=here,
        )

    @classmethod
    def missing(cls, name: str, error: ImportError) -> MatrixRow:
        """The row of a third party's backend whose module cannot be imported."""
        unknown = {each.name: "" for each in fields(cls)}
        return cls(**unknown | {"backend": name, "here": f"no: its module cannot be imported: {error}"})

    @property
    def cells(self) -> list[str]:
        return [str(value) for value in vars(self).values()]


def _head_dims(capabilities: Capabilities) -> list[str]:
    words = [] if capabilities.latents_only else [_sizes(capabilities.head_dims)]
    words += [f"{qk}/{v}" for qk, v in sorted(capabilities.dim_pairs)]
    if capabilities.latent_dims is not None:
        words.append("latents of {} + {} rotated".format(*map(_sizes, capabilities.latent_dims)))
    return words


def matrix_rows() -> list[MatrixRow]:
    """All registered backends, in the order of `backend_names`."""
    rows = []
    for name in backend_names():
        try:
            rows.append(MatrixRow.of(name, backend_class(name).capabilities))
        except ImportError as error:
            rows.append(MatrixRow.missing(name, error))
    return rows


def matrix_text(width: int = 100) -> str:
    """For a terminal: tables of what runs where, of limits and of features, what the feature words mean, and what installs the rest.

    The tables are at most `width` wide, and install lines, which are to be copied, are whole.
    """
    rows = [row.cells for row in matrix_rows()]
    tables = []
    for names in (
        ("Backend", "Here", "Devices", "Phases", "Graphs", "Needs"),
        ("Backend", "Dtypes", "KV dtypes", "Page sizes", "Head dims", "Group sizes"),
        ("Backend", "Features"),
        ("Backend", "Note"),
    ):
        columns = [HEADERS.index(name) for name in names]
        tables.append(text_table(names, [[row[i] for i in columns] for row in rows], width))
    legend = "\n".join(f"  {word:<15}{meaning}" for word, meaning in _legend())
    experts = text_table(EXPERTS_HEADERS, experts_cells(), width)
    found = scans_cells()
    halves = ([0, 1, 3, 4], [0, 2, 5, 6])  # side by side they are too wide
    scans = "\n\n".join(text_table([SCANS_HEADERS[i] for i in part], [[row[i] for i in part] for row in found], width) for part in halves)
    parts = [*tables, f"Features:\n{legend}", PAIRS, f"Experts, by experts_backend:\n\n{experts}"]
    parts.append(f"Recurrences, by scans_backend:\n\n{scans}")
    if lines := _install_lines():
        parts.append("\n".join(["To install:", *lines]))
    return "\n\n".join(parts)


def matrix_markdown() -> str:
    """For the documentation: the same on every machine, and so without the column "Here"."""
    rows = [row.cells[:-1] for row in matrix_rows()]
    legend = "\n".join(f"- `{word}`: {meaning}" for word, meaning in _legend())
    return f"{markdown_table(HEADERS[:-1], rows)}\n\n{legend}"


def experts_cells() -> list[list[str]]:
    """The backends for experts: a cell per column of EXPERTS_HEADERS."""
    return [[name, *_needs_cells(experts_backend(name).needs)] for name in EXPERTS]


def scans_cells() -> list[list[str]]:
    """The backends for scans: a cell per column of SCANS_HEADERS."""
    backends = [(name, scans_backend(name)) for name in SCANS]
    return [[name, "all" if each.ops == OPS else names_of(each.ops), *_needs_cells(each.needs)] for name, each in backends]


def _needs_cells(needs: Needs) -> list[str]:
    """What all kinds of backends say of themselves: the columns of EXPERTS_HEADERS after the first."""
    devices = names_of(needs.devices) + (f" ({architecture_words(needs.architectures)})" if needs.architectures else "")
    packages = ", ".join(map(requirement_words, needs.requirements)) or "nothing"
    return [devices, names_of(map(short_dtype, needs.dtypes)), packages, needs.note, available_here(needs)]


def experts_markdown() -> str:
    """For the documentation, without the column "Here"."""
    return markdown_table(EXPERTS_HEADERS[:-1], [row[:-1] for row in experts_cells()])


def scans_markdown() -> str:
    """As `experts_markdown`."""
    return markdown_table(SCANS_HEADERS[:-1], [row[:-1] for row in scans_cells()])


def available_here(capabilities: Needs) -> str:
    """`yes: cpu, cuda` with the devices of this machine that it can use, or `no: ` and every reason."""
    present = devices_here()
    if usable := [device for device in present if capabilities.runs_on(device)]:
        reasons = []
        found = set(present.get("cuda", []))
        if usable == ["cuda"] and capabilities.architectures and not found & capabilities.architectures:
            reasons.append(f"no GPU with {architecture_words(capabilities.architectures)}; found {architecture_words(found)}")
    else:
        reasons = [f"runs on {names_of(capabilities.devices)}; this machine has {names_of(present)}"]
    reasons += [missing for need in capabilities.requirements if (missing := why_unmet(need))]
    return f"no: {'; '.join(reasons)}" if reasons else f"yes: {names_of(usable)}"


def feature_word(feature: Feature) -> str:
    """`FP8_KV` -> "fp8-kv"."""
    return feature.name.lower().replace("_", "-")


def _install_lines() -> list[str]:
    """`  fa2, fa3: pip install ...` for each package that backends need and that is not here, or too old."""
    names, needed = dict[str, list[str]](), list[tuple[str, tuple[Requirement, ...]]]()
    for name in backend_names():
        try:
            needed.append((name, backend_class(name).capabilities.requirements))
        except ImportError:
            continue
    needed += [(name, scans_backend(name).needs.requirements) for name in SCANS]
    for name, needs in needed:
        for need in needs:
            if why_unmet(need) and name not in names.get(need.install, ()):
                names.setdefault(need.install, []).append(name)
    return [f"  {', '.join(found)}: {line}" for line, found in names.items()]


def _legend() -> list[tuple[str, str]]:
    return [(feature_word(feature), feature.value) for feature in Feature]


def _sizes(allowed: object) -> str:
    return "any" if allowed == ANY_SIZE else str(allowed)


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Columns side by side in at most `width` characters where words allow it; long cells wrap."""
    columns = list(zip(headers, *rows, strict=True))
    longest_words = [max(len(word) for cell in column for word in (cell.split() or [""])) for column in columns]
    widths = _fit([max(map(len, column)) for column in columns], longest_words, width)
    rule = ["-" * column for column in widths]
    lines = []
    for cells in (headers, rule, *rows):
        wrapped = [
            textwrap.wrap(cell, column, break_long_words=False, break_on_hyphens=False) or [""]
            for cell, column in zip(cells, widths, strict=True)
        ]
        for index in range(max(map(len, wrapped))):
            parts = [(cell[index] if index < len(cell) else "").ljust(column) for cell, column in zip(wrapped, widths, strict=True)]
            lines.append(GAP.join(parts).rstrip())
    return "\n".join(lines)


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A GitHub table; pipes in cells are escaped."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _fit(natural: list[int], minimum: list[int], width: int) -> list[int]:
    """Take from the widest column that can still shrink until all fit."""
    widths = list(natural)
    while sum(widths) + len(GAP) * (len(widths) - 1) > width:
        shrinkable = [i for i, size in enumerate(widths) if size > minimum[i]]
        if not shrinkable:
            break
        widths[max(shrinkable, key=lambda i: widths[i])] -= 1
    return widths
