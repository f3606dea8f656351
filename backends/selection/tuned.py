"""What `paged-attn tune` measured on this device, as JSON, and the order of backends that follows from it.

A file is for one device and holds an entry per kind of layer: head dims, query heads per KV head, dtypes and page size. It is used for
a model if it has all kinds of the model's layers and the packages are those that were measured; otherwise the reason says why it is not.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.private_files import read_file
from paged_attn.attn_ops.switches import path_of_variable
from paged_attn.backends.attention.capabilities import Feature, Problem
from paged_attn.backends.needs import short_dtype
from paged_attn.backends.selection.packages import PACKAGES, installed_version
from paged_attn.backends.selection.ranking import Order

logger = logging.getLogger("paged_attn")
VARIABLE = "PAGED_ATTN_TUNED"
MOST_BYTES = 16 << 20
FORMAT = 1
WORTH_TWO = 1.03  # a second backend for one phase must be faster by more than this, since it needs a plan and workspace of its own
PHASE_WORDS = {"extend": "prefill", "decode": "decode"}
Ranking = dict[str, float]  # backend -> geometric mean time over all shapes, relative to the fastest; fastest first


@dataclass(frozen=True)
class Kind:
    """The layers that an entry applies to."""

    group_size: int
    qk_head_dim: int
    v_head_dim: int
    dtype: str
    kv_dtype: str
    page_size: int
    deterministic: bool = False

    @classmethod
    def of(cls, problem: Problem) -> Kind:
        spec, dtypes = problem.spec, (short_dtype(problem.dtype), short_dtype(problem.kv_dtype))
        return cls(spec.group_size, spec.qk_head_dim, spec.v_head_dim, *dtypes, problem.page_size, Feature.DETERMINISTIC in problem.extra)

    def __str__(self) -> str:
        dims = f"{self.qk_head_dim}" if self.qk_head_dim == self.v_head_dim else f"{self.qk_head_dim}/{self.v_head_dim}"
        dtypes = self.dtype if self.dtype == self.kv_dtype else f"{self.dtype} with KV in {self.kv_dtype}"
        words = f"head dim {dims}, {self.group_size} query heads per KV head, {dtypes}, pages of {self.page_size}"
        return words + ", deterministic" * self.deterministic


@dataclass(frozen=True)
class Entry:
    """One measurement: `microseconds[phase][shape][backend]`, or the reason as text if a backend failed.

    `versions`: those that the result depends on; `conditions`: for readers.
    """

    kind: Kind
    date: str
    versions: dict[str, str]
    microseconds: dict[str, dict[str, dict[str, float | str]]]
    conditions: dict[str, Any] = field(default_factory=dict)

    def ranking(self, phase: str) -> Ranking:
        """The ranking of the backends that ran every shape."""
        shapes = [{n: us for n, us in times.items() if not isinstance(us, str) and us > 0} for times in self.microseconds[phase].values()]
        names = set.intersection(*map(set, shapes)) if shapes else set()
        return _ranked({name: math.fsum(math.log(times[name]) for times in shapes) / len(shapes) for name in names})

    def as_json(self) -> dict[str, Any]:
        rankings = {phase: {name: round(ratio, 4) for name, ratio in self.ranking(phase).items()} for phase in self.microseconds}
        return asdict(self) | {"ranking": rankings}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Entry:
        """Raises KeyError, TypeError, ValueError or AttributeError: it is not an entry."""
        for times in (times for phase in PHASE_WORDS for times in data["microseconds"][phase].values()):
            if not all(isinstance(each, float | int | str) for each in times.values()):
                raise ValueError(f"the times {times} are not numbers")
        return cls(Kind(**data["kind"]), data["date"], data["versions"], data["microseconds"], data.get("conditions", {}))


def tuned_path(device_name: str) -> Path | None:
    """$PAGED_ATTN_TUNED (None if off), or the device's file in the user's cache directory, which need not exist."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    of_device = f"{re.sub(r'[^a-z0-9]+', '-', device_name.lower()).strip('-')}.json"
    return path_of_variable(VARIABLE, cache / "paged_attn" / "tuned" / of_device)


def read_entries(path: Path, device_name: str) -> list[Entry]:
    """The entries of a file; none if there is no file or it is for another device.

    Raises:
        UnsupportedError: the file cannot be read, or was not written by `paged-attn tune`.
    """
    if not path.exists():
        return []
    try:
        data = json.loads(read_file(path, MOST_BYTES))
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}, this version reads {FORMAT}")
        return [Entry.from_json(entry) for entry in data["entries"]] if data["device"] == device_name else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedError(
            f"{path} cannot be read as measurements of attention backends ({type(error).__name__}: {error}); "
            f"delete it, run `paged-attn tune` again, or set {VARIABLE}=none"
        ) from error


def write_entry(path: Path, device_name: str, entry: Entry) -> None:
    """Adds an entry to a file, replacing one for the same kind. Overwrites a file that is for another device or cannot be read."""
    try:
        kept = [other for other in read_entries(path, device_name) if other.kind != entry.kind]
    except UnsupportedError as error:
        logger.warning("overwriting it: %s", error)
        kept = []
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"format": FORMAT, "device": device_name, "entries": [each.as_json() for each in (*kept, entry)]}
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


def current_versions() -> dict[str, str]:
    """The versions of all installed packages that a measurement depends on."""
    modules = {package.module: package.distributions for package in PACKAGES if package.is_kernels}
    modules |= {"torch": ("torch",), "paged_attn": ("paged-attn",)}
    found = {module: installed_version(module, distributions) for module, distributions in modules.items()}
    return {module: version for module, version in sorted(found.items()) if version is not None}


def tuned_order(problems: Sequence[Problem], device_name: str) -> tuple[Order | None, str]:
    """The measured order for these layers, or None and a clause on why existing measurements are not used ("" without any).

    Raises:
        UnsupportedError: see `read_entries`.
    """
    path = tuned_path(device_name)
    entries = {entry.kind: entry for entry in read_entries(path, device_name)} if path else {}
    counts = Counter(Kind.of(problem) for problem in problems)
    if not entries or not counts:
        return None, ""
    for kind in counts:
        if kind not in entries:
            return None, f"{path} has no measurement for {kind}"
        old, new = entries[kind].versions, current_versions()
        if changed := [f"{m} {old.get(m, '(none)')}, now {new.get(m, '(none)')}" for m in sorted(old | new) if old.get(m) != new.get(m)]:
            return None, f"{path} was measured with {'; '.join(changed)}: run `paged-attn tune` again"
    weighted = [(entries[kind], count) for kind, count in counts.items()]
    rankings = {phase: _combined([(entry.ranking(phase), count) for entry, count in weighted]) for phase in PHASE_WORDS}
    if not all(rankings.values()):
        return None, f"{path} has no backend that ran every shape in both phases"
    dates = ", ".join(sorted({entry.date for entry, _ in weighted}))
    return _order(rankings, f"that `paged-attn tune` measured on {dates}, {path}"), ""


def _combined(rankings: Sequence[tuple[Ranking, int]]) -> Ranking:
    """One ranking for several kinds of layers, weighted by their number of layers."""
    names = set.intersection(*(set(ranking) for ranking, _ in rankings))
    total = sum(count for _, count in rankings)
    return _ranked({name: math.fsum(math.log(ranking[name]) * count for ranking, count in rankings) / total for name in names})


def _ranked(logarithms: Mapping[str, float]) -> Ranking:
    best = min(logarithms.values(), default=0.0)
    return {name: math.exp(logarithms[name] - best) for name in sorted(logarithms, key=lambda n: (logarithms[n], n))}


def _order(rankings: Mapping[str, Ranking], source: str) -> Order:
    extend, decode = rankings["extend"], rankings["decode"]
    near = [n for n in extend if n in decode and extend[n] <= WORTH_TWO and decode[n] <= WORTH_TWO]
    near.sort(key=lambda n: extend[n] * decode[n])
    orders = [tuple(dict.fromkeys([*near, *ranking])) for ranking in (extend, decode)]
    numbers = [f"{PHASE_WORDS[phase]} {', '.join(f'{n} {over:.2f}' for n, over in rankings[phase].items())}" for phase in PHASE_WORDS]
    notes = {}
    for name in extend | decode:
        parts = [f"{rankings[p][name]:.2f} x the fastest in {word}" for p, word in PHASE_WORDS.items() if name in rankings[p]]
        notes[name] = f"measured {', '.join(parts)}"
    return Order(orders[0], orders[1], f"the order {source} (time over the fastest: {'; '.join(numbers)})", notes)
