"""What `explain` reports about capture: the mode per phase and shape, megabytes, seconds, and why a shape has no graph."""

from __future__ import annotations

from dataclasses import dataclass, field

from paged_attn.capture.graphs.graph_set import MIB, GraphSet, Mode
from paged_attn.engine.steps.capture_specs import CaptureSettings


@dataclass(frozen=True)
class PhaseReport:
    """Sizes of one mode (requests of full graphs, rows of pieces), and of how many graphs and ops each consists."""

    sizes: tuple[int, ...]
    graphs: int
    calls: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class CaptureReport:
    """Attributes:
    full, pieces: what was captured whole (decode) and in pieces (any step); None if nothing.
    refused: shapes without a graph, and why.
    why_not_full: why there are no full graphs, or "".
    runs_as: how the model itself is called.
    verify: every replay is compared.
    """

    full: PhaseReport | None
    pieces: PhaseReport | None
    refused: dict[str, str] = field(default_factory=dict)
    unsafe: dict[str, str] = field(default_factory=dict)
    why_not_full: str = ""
    runs_as: str = ""
    verify: bool = False

    @classmethod
    def of(cls, graphs: GraphSet | None, settings: CaptureSettings, runs_as: str, why_not_full: str) -> CaptureReport:
        if graphs is None:
            return cls(None, None, why_not_full="capture is off", runs_as=runs_as)
        refused = {str(key): reason for key, reason in graphs.refused.items()}
        unsafe = {str(op): reason for op, reason in graphs.unsafe.items()}
        return cls(_phase(graphs, "full"), _phase(graphs, "piecewise"), refused, unsafe, why_not_full, runs_as, settings.verify)

    @property
    def nbytes(self) -> int:
        return sum(phase.nbytes for phase in (self.full, self.pieces) if phase is not None)

    def lines(self) -> list[str]:
        """For a terminal."""
        pieces, full = self.pieces, self.full
        rest = f"captured pieces of {_range(pieces.sizes)} rows" if pieces else f"uncaptured, {self.runs_as}"
        lines = [
            f"  decode       {_whole(full)}" if full else f"  decode       {rest} (not whole: {self.why_not_full or 'none was captured'})"
        ]
        if full:
            lines.append(f"               beyond {full.sizes[-1]} requests: {rest}")
        lines.append(f"  extend       {_parts(pieces)}" if pieces else f"  extend       {rest}")
        if pieces:
            lines.append(f"               beyond {pieces.sizes[-1]} rows: uncaptured, {self.runs_as}")
        if self.verify:
            lines.append("  verify       every replay is compared with the model uncaptured")
        lines += [f"  between      {op}: {reason}" for op, reason in self.unsafe.items()]
        return lines + [f"  no graph     {key}: {reason}" for key, reason in self.refused.items()]


def _whole(phase: PhaseReport) -> str:
    between = f", {phase.calls} ops between {phase.graphs} graphs each" if phase.calls else ""
    return f"full graphs of {_range(phase.sizes)} requests{between}; {_cost(phase)}"


def _parts(phase: PhaseReport) -> str:
    return f"captured pieces of {_range(phase.sizes)} rows, {phase.calls} ops between {phase.graphs} graphs each; {_cost(phase)}"


def _cost(phase: PhaseReport) -> str:
    return f"{phase.nbytes / MIB:,.0f} MiB, {phase.seconds:.1f} s"


def _range(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} ({len(sizes)} sizes)"


def _phase(graphs: GraphSet, mode: Mode) -> PhaseReport | None:
    all_of = [captured for key, captured in graphs.captured.items() if key.mode == mode]
    if not all_of:
        return None
    most = max(all_of, key=lambda captured: captured.segments.num_calls).segments
    return PhaseReport(
        tuple(graphs.sizes(mode)), most.num_graphs, most.num_calls, sum(c.nbytes for c in all_of), sum(c.seconds for c in all_of)
    )
