"""Draws a record as an SVG: for each workload one bar per system, its length the system's speed relative to the fastest."""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

COLORS = {
    "paged_attn": "#2563eb", "transformers": "#f59e0b", "transformers-generate": "#fcd34d",
    "vllm": "#10b981", "vllm-transformers": "#6ee7b7",
}  # fmt: skip
WIDTH, LABELS, BAR, GAP, HEAD, VALUES = 900, 160, 18, 30, 62, 230
INK, PALE = "#111827", "#6b7280"


def draw(record: dict[str, Any]) -> str:
    """The text of the SVG, the same for the same record. Raises ValueError: the record holds no time."""
    blocks = [(workload, _bars(record, workload["name"])) for workload in record["workloads"]]
    blocks = [(workload, bars) for workload, bars in blocks if bars]
    if not blocks:
        raise ValueError("no chart: nothing was timed")
    model = record["model"]
    height = HEAD + sum(GAP + len(bars) * BAR for _, bars in blocks) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(16, 26, "Output tokens per second, the same prompts", size=16, weight="bold"),
        _text(16, 46, f"{record['machine']['device']}, {model['name']}, {model['dtype']}, {record['decoding']}; {record['date']}", PALE),
    ]
    top = HEAD
    for workload, bars in blocks:
        parts.append(_text(16, top + 18, workload["name"], weight="bold"))
        top += GAP - 6
        best = max(speed for _, speed, _ in bars)
        for system, speed, label in bars:
            length = (WIDTH - LABELS - VALUES) * speed / best
            color = COLORS.get(system, PALE)
            parts.append(_text(LABELS - 8, top + 13, system, PALE, anchor="end"))
            parts.append(f'<rect x="{LABELS}" y="{top + 2}" width="{length:.1f}" height="{BAR - 4}" rx="2" fill="{color}"/>')
            parts.append(_text(LABELS + length + 6, top + 13, label))
            top += BAR
        top += 6
    return "\n".join([*parts, "</svg>", ""])


def _bars(record: dict[str, Any], workload: str) -> list[tuple[str, float, str]]:
    """(system, tokens per second, label) of each that was timed."""
    found = []
    for system, outcome in record["systems"].items():
        if (timed := outcome["timed"].get(workload)) is not None:
            ratio = record["ratios"].get(system, {}).get(workload)
            label = f"{timed['tokens_per_second']:,.0f} tokens/s, {timed['seconds']:.3f} s" + ("" if ratio is None else f", x{ratio:.2f}")
            found.append((system, timed["tokens_per_second"], label))
    return found


def _text(x: float, y: float, text: str, color: str = INK, *, anchor: str = "start", size: int = 12, weight: str = "normal") -> str:
    attributes = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {attributes} fill="{color}" font-size="{size}" font-weight="{weight}">{escape(text)}</text>'
