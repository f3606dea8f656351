"""`paged-attn tune`: time every attention backend that fits on this device; backend="auto" then uses the measurements."""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paged_attn.cli.problem import LayerShape, add_shape_options, layer_shape
from paged_attn.cli.report import bold, width

if TYPE_CHECKING:
    import torch

    from paged_attn.backends.attention.base import AttentionBackend
    from paged_attn.backends.selection.requirements import Requirements
    from paged_attn.backends.selection.tuned import Entry

HELP = "time the backends here, so that auto takes the fastest"
Times = dict[str, dict[str, dict[str, float | str]]]  # phase -> shape -> backend -> microseconds, or why there are none
GPU_SHAPES = {
    "decode": ("1x4096", "8x4096", "64x4096", "256x512", "32x16384"),
    "extend": ("1x2048x2048", "8x1024x1024", "4x512x8192", "1x128x32768"),
}
CPU_SHAPES = {"decode": ("1x256", "8x256"), "extend": ("1x64x64", "4x16x128")}
MIN_MS = {"cuda": 100.0, "cpu": 20.0}


@dataclass(frozen=True)
class Step:
    """Requests of one step, all alike: `4x512x8192` is 4 requests of 512 new tokens and 8,192 with the cached ones, `64x4096` decodes."""

    phase: str
    label: str

    @property
    def requests(self) -> tuple[tuple[int, int], ...]:
        """(cached, new) of each."""
        count, *rest = map(int, self.label.split("x"))
        new, total = (1, rest[0]) if self.phase == "decode" else (rest[0], rest[1])
        return ((total - new, new),) * count


def add_options(parser: argparse.ArgumentParser) -> None:
    add_shape_options(parser)
    group = parser.add_argument_group("measurement")
    group.add_argument("--device", help="cuda, cuda:N or cpu (default: the GPU if there is one)")
    group.add_argument("--backend", action="append", metavar="NAME", help="time this one; may be given many times (default: all that fit)")
    group.add_argument("--decode", action="append", metavar="BxK", help="B requests with K tokens each, one of them new; may be repeated")
    group.add_argument("--prefill", action="append", metavar="BxNxK", help="B requests with N new tokens of K; may be repeated")
    group.add_argument("--deterministic", action="store_true", help="time the batch-invariant kernels")
    group.add_argument("--min-ms", type=float, metavar="MS", help="time spent on each backend and shape (default: 100, on a CPU 20)")
    group.add_argument("--out", metavar="FILE", help="default: $PAGED_ATTN_TUNED, or a file of this device in the user's cache directory")


def run(args: argparse.Namespace) -> int:
    """Returns 1 if no backend ran every shape of a phase."""
    from paged_attn.backends.devices import checked_device, device_name
    from paged_attn.backends.selection.requirements import Requirements
    from paged_attn.backends.selection.tuned import Entry, Kind, current_versions, write_entry

    device = checked_device(args.device)
    shape = layer_shape(args, device)
    steps = _steps(args, device)
    if args.min_ms is not None and not args.min_ms > 0:
        raise ValueError(f"--min-ms is {args.min_ms:g}; allowed are values above 0")
    path = _out(args.out, device_name(device))
    required = Requirements.of([shape.spec], shape.dtype, shape.dtype, shape.page_size, device, deterministic=args.deterministic)
    backends, left_out = _backends(required, args.backend)
    print(bold(f"{device_name(device)}: {shape}" + ", deterministic" * args.deterministic), flush=True)
    for why in dict.fromkeys(left_out.values()):
        print(f"  without {', '.join(name for name in left_out if left_out[name] == why)}: {why}")
    min_ms = args.min_ms or MIN_MS[device.type]
    times = measure(backends, required, shape, steps, min_ms, device)
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    found = {"layer": str(shape), "min_ms": min_ms, **conditions(device)}
    entry = Entry(Kind.of(required.problems[0]), now, current_versions(), times, found)
    print(f"\n{table(entry, width())}")
    if not all(entry.ranking(phase) for phase in times):
        print("no backend ran every shape of both phases; nothing was written", file=sys.stderr)
        return 1
    write_entry(path, device_name(device), entry)
    print(f"\nwritten to {path}\n{_now(required, path)}")
    return 0


def measure(
    backends: Mapping[str, AttentionBackend],
    required: Requirements,
    shape: LayerShape,
    steps: Sequence[Step],
    min_ms: float,
    device: torch.device,
) -> Times:
    """Time each step with the backends that serve its phase; a line goes to stderr before each."""
    import torch

    from paged_attn.backends.selection.tuned import PHASE_WORDS
    from paged_attn.backends.timing.time_backends import TimedProblem, time_backends

    times: Times = {"extend": {}, "decode": {}}
    for number, step in enumerate(steps, 1):
        able = {name: each for name, each in backends.items() if not required.reasons(name, frozenset({step.phase}))}
        print(f"[{number}/{len(steps)}] {PHASE_WORDS[step.phase]} {step.label}: {', '.join(able)}", file=sys.stderr, flush=True)
        kind: Literal["decode", "prefill"] = "decode" if step.phase == "decode" else "prefill"
        problem = TimedProblem(kind, step.requests, shape.spec, shape.page_size, shape.dtype)
        try:
            found = time_backends(able, problem, min_ms=min_ms, device=device)
        except torch.OutOfMemoryError as error:
            times[step.phase][step.label] = dict.fromkeys(able, f"the inputs do not fit in memory: {error}")
            continue
        times[step.phase][step.label] = {name: t.microseconds if t.error is None else t.error for name, t in found.items()}
    return times


def table(entry: Entry, columns: int) -> str:
    """Microseconds of a layer, the fastest of each step marked; then what failed, and the rankings."""
    from paged_attn.backends.selection.tuned import PHASE_WORDS
    from paged_attn.report.backend_matrix import text_table

    names = list(dict.fromkeys(name for shapes in entry.microseconds.values() for row in shapes.values() for name in row))
    rows, failures = [], []
    for phase, shapes in entry.microseconds.items():
        for label, row in shapes.items():
            best = min((us for us in row.values() if not isinstance(us, str)), default=None)
            cells = ["-" if name not in row else "error" if isinstance(us := row[name], str) else f"{us:.1f}" for name in names]
            rows.append([f"{PHASE_WORDS[phase]} {label}", *(c + "*" * (row.get(n) == best) for n, c in zip(names, cells, strict=True))])
            failures += [f"{PHASE_WORDS[phase]} {label}, {name}: {us}" for name, us in row.items() if isinstance(us, str)]
    lines = [text_table(("us per layer", *names), rows, columns), *failures, ""]
    for phase in entry.microseconds:
        ranking = ", ".join(f"{name} {over:.2f}" for name, over in entry.ranking(phase).items()) or "none ran every shape"
        lines.append(f"{PHASE_WORDS[phase]}: {ranking}")
    return "\n".join([*lines, "(time over the fastest's, geometric mean of the shapes)"])


def conditions(device: torch.device) -> dict[str, Any]:
    """Facts about the machine and the run, for readers of the file."""
    import torch

    found: dict[str, Any] = {"command": "paged-attn " + " ".join(sys.argv[1:]), "python": platform.python_version()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"cuda": torch.version.cuda, "multiprocessors": properties.multi_processor_count, "driver": _driver()}
    else:
        found |= {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    return found


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown: there is no nvidia-smi"
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return done.stdout.partition("\n")[0].strip() or "unknown: nvidia-smi failed"


def _steps(args: argparse.Namespace, device: torch.device) -> list[Step]:
    usual = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    given = {"extend": args.prefill or usual["extend"], "decode": args.decode or usual["decode"]}
    for phase, flag, form in (("extend", "--prefill", r"\d+x\d+x\d+"), ("decode", "--decode", r"\d+x\d+")):
        for label in given[phase]:
            numbers = [int(n) for n in label.split("x")] if re.fullmatch(form, label) else [0]
            least = 2 if phase == "decode" else 1
            if min(numbers) < 1 or numbers[-1] < max(numbers[-2] if phase == "extend" else 1, least):
                example = "4x512x8192, with no more new tokens than tokens" if phase == "extend" else "64x4096, with at least 2 tokens"
                raise ValueError(f"{flag} {label!r} is not a step; allowed are numbers as in {example}")
    return [Step(phase, label) for phase in ("extend", "decode") for label in given[phase]]


def _backends(required: Requirements, asked: Sequence[str] | None) -> tuple[dict[str, AttentionBackend], dict[str, str]]:
    """What is timed, and why the others of this hardware are not. Raises ValueError: an unknown name; UnsupportedError: nothing fits, or
    something that was asked for does not."""
    from paged_attn.attn_ops.errors import UnsupportedError
    from paged_attn.backends.selection.ranking import ORACLE
    from paged_attn.backends.selection.registry import backend_class, backend_names
    from paged_attn.backends.selection.select import make_backends

    fits, left_out = list[str](), dict[str, str]()
    for name in asked or [name for name in backend_names() if name != ORACLE]:
        if name not in backend_names():
            backend_class(name)  # raises, and lists the known names
        if all(required.reasons(name, frozenset({phase})) for phase in ("extend", "decode")):
            left_out[name] = "; ".join(required.reasons(name))
        else:
            fits.append(name)
    made, failed = make_backends(fits, required.deterministic)
    left_out |= failed
    if not made or (asked and left_out):
        reasons = "\n".join(f"  {name}: {why}" for name, why in left_out.items())
        raise UnsupportedError(f"{'not every backend asked for' if asked else 'no backend'} can be timed here:\n{reasons}")
    return made, left_out


def _out(given: str | None, name: str) -> Path:
    from paged_attn.backends.selection.tuned import VARIABLE, tuned_path

    path = Path(given).expanduser() if given else tuned_path(name)
    if path is None:
        raise ValueError(f"{VARIABLE} is off, so that no measurement is used; unset it, or give --out FILE")
    return path


def _now(required: Requirements, path: Path) -> str:
    from paged_attn.backends.selection.select import pick, why_picked
    from paged_attn.backends.selection.tuned import VARIABLE, tuned_path

    if tuned_path(required.device_name) != path:
        return f"set {VARIABLE}={path} for backend='auto' to use it"
    order = required.order()
    names, _ = pick(required, order, {})
    return f"backend='auto' now takes {','.join(names)} for such layers ({why_picked(order, names)})"
