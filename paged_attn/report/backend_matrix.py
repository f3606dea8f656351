"""The support matrix: what each backend of attention, of experts and of scans can run, generated from their capabilities."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from paged_attn.backends.attention.capabilities import ANY_SIZE, PHASES, Capabilities, Feature
from paged_attn.backends.devices import devices_here
from paged_attn.backends.needs import Needs, architecture_words, names_of, short_dtype
from paged_attn.backends.scans.base import OPS
from paged_attn.backends.selection.experts import BUILT_IN as EXPERTS
from paged_attn.backends.selection.experts import experts_backend
from paged_attn.backends.selection.packages import requirement_words, why_unmet
from paged_attn.backends.selection.registry import backend_class, backend_names, loadable_classes
from paged_attn.backends.selection.scans import BUILT_IN as SCANS
from paged_attn.backends.selection.scans import scans_backend

HEADERS = (
    "Backend", "Devices", "Phases", "Dtypes", "KV dtypes", "Page sizes", "Head dims", "Group sizes", "Features", "Graphs", "Needs", "Note",
    "Here",
)  # fmt: skip
PAIRS = "Two names are one backend for prefill and one for decode: backend='fa3,flashinfer'."
GAP = "  "
Row = dict[str, str]  # the cells of one backend, by column


def attention_row(name: str, capabilities: Capabilities) -> Row:
    """A cell for each of HEADERS; that of "Here" starts with "yes" or "no"."""
    conflicts = ("not " + " with ".join(sorted(map(feature_word, group))) for group in capabilities.conflicts)
    cells = _needs_row(capabilities) | {
        "Backend": name,
        "Phases": "both" if capabilities.phases == PHASES else f"{names_of(capabilities.phases)} only",
        "KV dtypes": names_of(map(short_dtype, capabilities.kv_dtypes)),
        "Page sizes": _sizes(capabilities.page_sizes),
        "Head dims": ", ".join(_head_dims(capabilities)),
        "Group sizes": _sizes(capabilities.group_sizes),
        "Features": "; ".join([names_of(map(feature_word, capabilities.features)) or "none", *sorted(conflicts)]),
        "Graphs": ", ".join(f"{phase}: {support.value}" for phase, support in capabilities.graphs.items()),
    }
    return {column: cells[column] for column in HEADERS}


def _head_dims(capabilities: Capabilities) -> list[str]:
    words = [] if capabilities.latents_only else [_sizes(capabilities.head_dims)]
    words += [f"{qk}/{v}" for qk, v in sorted(capabilities.dim_pairs)]
    if capabilities.latent_dims is not None:
        words.append("latents of {} + {} rotated".format(*map(_sizes, capabilities.latent_dims)))
    return words


def attention_rows() -> list[Row]:
    """All registered backends of attention, in the order of `backend_names`; of a module that cannot be imported, only that."""
    rows = []
    for name in backend_names():
        try:
            rows.append(attention_row(name, backend_class(name).capabilities))
        except ImportError as error:
            rows.append({**dict.fromkeys(HEADERS, ""), "Backend": name, "Here": f"no: its module cannot be imported: {error}"})
    return rows


def experts_rows() -> list[Row]:
    return [{"Backend": name, **_needs_row(experts_backend(name).needs)} for name in EXPERTS]


def scans_rows() -> list[Row]:
    backends = [(name, scans_backend(name)) for name in SCANS]
    return [{"Backend": name, "Ops": "all" if each.ops == OPS else names_of(each.ops), **_needs_row(each.needs)} for name, each in backends]


def _needs_row(needs: Needs) -> Row:
    """What all kinds of backends say of themselves."""
    return {
        "Devices": names_of(needs.devices) + (f" ({architecture_words(needs.architectures)})" if needs.architectures else ""),
        "Dtypes": names_of(map(short_dtype, needs.dtypes)),
        "Needs": ", ".join(map(requirement_words, needs.requirements)) or "nothing",
        "Note": needs.note,
        "Here": available_here(needs),
    }


def matrix_text(width: int = 100) -> str:
    """For a terminal: tables of what runs where, of limits and of features, what the feature words mean, and what installs the rest.

    The tables are at most `width` wide, and install lines, which are to be copied, are whole.
    """

    def table(rows: Sequence[Row], *columns: str) -> str:
        return text_table(columns, [[row[column] for column in columns] for row in rows], width)

    rows, scans = attention_rows(), scans_rows()
    legend = "\n".join(f"  {word:<15}{meaning}" for word, meaning in _legend())
    parts = [
        table(rows, "Backend", "Here", "Devices", "Phases", "Graphs", "Needs"),
        table(rows, "Backend", "Dtypes", "KV dtypes", "Page sizes", "Head dims", "Group sizes"),
        table(rows, "Backend", "Features"),
        table(rows, "Backend", "Note"),
        f"Features:\n{legend}",
        PAIRS,
        f"Experts, by experts_backend:\n\n{table(experts_rows(), 'Backend', 'Devices', 'Dtypes', 'Needs', 'Note', 'Here')}",
        f"Recurrences, by scans_backend:\n\n{table(scans, 'Backend', 'Ops', 'Dtypes', 'Needs')}",  # side by side both are too wide
        table(scans, "Backend", "Devices", "Note", "Here"),
    ]
    if lines := _install_lines():
        parts.append("\n".join(["To install:", *lines]))
    return "\n\n".join(parts)


def matrix_markdown() -> str:
    """For the documentation: attention's rows and what its feature words mean."""
    legend = "\n".join(f"- `{word}`: {meaning}" for word, meaning in _legend())
    return f"{rows_markdown(attention_rows())}\n\n{legend}"


def rows_markdown(rows: Sequence[Row]) -> str:
    """For the documentation: the same on every machine, and so without the column "Here"."""
    columns = [column for column in rows[0] if column != "Here"]
    return markdown_table(columns, [[row[column] for column in columns] for row in rows])


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
    names = dict[str, list[str]]()
    needed = [(name, cls.capabilities.requirements) for name, cls in loadable_classes().items()]
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
