"""Draw docs/kernels.svg from what benchmarks/kernels.py measured: decode in GB/s, prefill in TFLOP/s, each against its ceiling.

python benchmarks/chart.py [--data benchmarks/results/kernels.json] [--out docs/kernels.svg]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paged_attn.attn_ops.install_line import install_line

HERE = Path(__file__).parent
COLORS = {
    "triton": "#2563eb", "triton deterministic": "#93b4f5", "fa3": "#f59e0b", "flashinfer": "#10b981", "trtllm_mha": "#84cc16",
    "flash_attn": "#a16207", "torch_varlen": "#db2777", "flex": "#8b5cf6", "torch_native": "#9ca3af",
}  # fmt: skip
PANELS = (("decode", "gbytes_per_s", "GB/s", "read"), ("prefill", "tflops", "TFLOP/s", "gemm"))
DEFAULT = "triton,fa3,flashinfer"


def draw(record: dict[str, Any], backends: Sequence[str], out: Path) -> None:
    """Bars per shape and backend; a backend without a time for a shape has a gap.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: the file holds no time of any of the backends.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(f"the chart needs matplotlib: {install_line('bench')}") from error
    matplotlib.use("svg")
    from matplotlib import pyplot

    timed = [row for row in record["rows"] if row["backend"] in backends and "error" not in row]
    shown = [name for name in backends if any(row["backend"] == name for row in timed)]
    if not shown:
        raise ValueError(f"no times of {', '.join(backends)}; the file has {sorted({row['backend'] for row in record['rows']})}")
    shapes = {kind: list(dict.fromkeys(row["shape"] for row in timed if row["kind"] == kind)) for kind, *_ in PANELS}
    style = {"font.family": "sans-serif", "font.size": 9, "svg.hashsalt": "kernels", "svg.fonttype": "none", "axes.titlesize": 10.5}
    with pyplot.rc_context(style):
        widths = [max(1, len(shapes[kind])) for kind, *_ in PANELS]
        figure, axes = pyplot.subplots(1, len(PANELS), figsize=(13, 4.4), width_ratios=widths, layout="constrained")
        for axis, (kind, field, unit, ceiling) in zip(axes, PANELS, strict=True):
            values = {(row["shape"], row["backend"]): row[field] for row in timed if row["kind"] == kind}
            _panel(axis, f"{kind.capitalize()}, {unit}", shapes[kind], shown, values, record["ceilings"][ceiling])
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=len(shown) + 1, frameon=False, handlelength=1.2)
        figure.text(0.99, 0.995, _caption(record), ha="right", va="top", fontsize=7, color="#6b7280")
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, format="svg", metadata={"Date": None})
        pyplot.close(figure)


def _panel(
    axis: Any, title: str, shapes: Sequence[str], backends: Sequence[str], values: dict[tuple[str, str], float], ceiling: float
) -> None:
    width = 0.8 / len(backends)
    for index, backend in enumerate(backends):
        heights = [values.get((shape, backend), 0.0) for shape in shapes]
        xs = [tick + (index - (len(backends) - 1) / 2) * width for tick in range(len(shapes))]
        bars = axis.bar(xs, heights, width * 0.92, label=backend, color=COLORS.get(backend, "#374151"), zorder=2)
        if width > 0.2 or len(shapes) < 6:
            axis.bar_label(bars, [f"{h:,.0f}" if h else "" for h in heights], fontsize=5.5, padding=1, color="#374151")
    axis.axhline(ceiling, color="#ef4444", linewidth=1, linestyle=(0, (4, 3)), label="ceiling measured here", zorder=1)
    axis.set_title(title, loc="left", fontweight="bold")
    axis.set_xticks(range(len(shapes)), [_tick(shape) for shape in shapes], fontsize=8)
    axis.set_xlim(-0.6, max(1, len(shapes)) - 0.4)
    axis.set_ylim(0, max([ceiling, *values.values()]) * 1.08)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.grid(axis="y", color="#e5e7eb", linewidth=0.7, zorder=0)
    axis.tick_params(length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _tick(shape: str) -> str:
    """`decode 64 x 4,096` -> "64 x" over "4,096"."""
    words = shape.split()[1:]
    return "\n".join(words) if words[0] == "ragged" else " ×\n".join(" ".join(words).split(" x "))


def _caption(record: dict[str, Any]) -> str:
    return f"{record['gpu']}, {record['date']}; {record['conditions']['layer']}; batch × KV length, batch × new × KV length"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=HERE / "results" / "kernels.json")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "kernels.svg")
    parser.add_argument("--backends", default=DEFAULT, help=f"comma-separated, in the order of the bars; default: {DEFAULT}")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    draw(json.loads(args.data.read_text()), args.backends.split(","), args.out)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
