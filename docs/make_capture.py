"""Writes the tables of docs/capture_figures.md from the JSON of `benchmarks/capture.py`, each between its marks: `make docs`."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from docs import marked_tables
from paged_attn.report.backend_matrix import markdown_table

PAGE = Path(__file__).with_name("capture_figures.md")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
BEST, PLAIN = "full_default", "eager_full"  # of the modes whose kernels were listed: the defaults, and PyTorch's own kernels
LATE = "gemv=False, pdl=False"
MODES = {
    "eager": ("hooked, uncaptured", 'compile=False, graphs="off"'),
    "eager_break": ("eager breaks", 'compile=False, graphs="piecewise"'),
    "eager_full": ("hooked, decode whole", "compile=False"),
    "compiled": ("compiled, uncaptured", f'graphs="off", merge_linears=False, {LATE}'),
    "pieces": ("compiled pieces", f'graphs="piecewise", merge_linears=False, {LATE}'),
    "full": ("full graphs", f"merge_linears=False, {LATE}"),
    "full_merged": ("full graphs, merged linears", LATE),
    "full_early": ("the same, early launches", "gemv=False"),
    "full_one_row": ("full graphs, merged linears, single rows", "pdl=False"),
    "full_default": ("all that", "the defaults"),
}
KINDS = {  # the first pattern that a kernel's name holds
    "RMSNorm, with the residual's addition": r"^triton_.*rsqrt",
    "SiLU and multiplication": r"^triton_.*silu",
    "RoPE of q and of k": r"^triton_.*cat_mul_neg",
    "attention, with the KV write": r"^attend|^deal_|[Ff]lash",
    "the most likely token": r"^best_of|ArgMax|at::native::Arg",
    "matrix products": r"^one_row|nvjet|splitKreduce|tensorop|gemv",
    "PyTorch's element-wise kernels and reductions": r"at::native",
}
REST = "all else"


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def conditions(data: Any, _: Any) -> str:
    versions = f"torch {data['torch']}, transformers {data['transformers']}"
    backend, ceilings = data["modes"][BEST]["backend"], data["ceilings"]
    return (
        f"One {data['device']}, {data['date']}; {versions}, attention by {backend}. {data['context']} tokens per request. Measured in the "
        f"same process: reading {ceilings['read']:,.0f} GB/s, a bfloat16 matrix product {ceilings['gemm']:,.0f} TFLOP/s."
    )


def decode(data: Any, _: Any) -> str:
    """Milliseconds and the share of the floor for each batch, microseconds of the host, MiB of graphs."""
    batches = list(data["modes"][BEST]["decode"])
    rows = []
    for _name, words, settings, found in _modes(data):
        steps = [found["decode"][batch] for batch in batches]
        host = " / ".join(f"{step['host_us']:,.0f}" for step in steps)
        rows.append(
            [words, settings, *(f"{step['ms']:.2f} ({step['of_floor']:.0%})" for step in steps), host, f"{found['graph_mib']:,.0f}"]
        )
    floor = [f"{data['modes'][BEST]['decode'][batch]['floor_ms']:.2f}" for batch in batches]
    rows.append(["the floor", "", *floor, "", ""])
    return markdown_table(["mode", "settings", *(f"batch {batch}" for batch in batches), "host, us", "graphs, MiB"], rows)


def prompts(data: Any, _: Any) -> str:
    lengths = list(data["modes"][BEST]["extend"])
    rows = [[words, settings, *(f"{found['extend'][n]['ms']:.1f}" for n in lengths)] for _, words, settings, found in _modes(data)]
    return markdown_table(["mode", "settings", *(f"{int(n):,} tokens" for n in lengths)], rows)


def kernels(data: Any, _: Any) -> str:
    """Microseconds and calls by kind, for the smallest and the largest batch that were profiled."""
    columns = [(mode, batch) for mode in (BEST, PLAIN) for batch in _profiled(data, mode)]
    found = {column: _by_kind(data["modes"][column[0]]["decode"][column[1]]) for column in columns}
    rows = []
    for kind in (*KINDS, REST):
        cells = [found[column].get(kind, (0.0, 0)) for column in columns]
        rows.append([kind, *(f"{us:,.0f}" + (f" ({calls})" if calls else "") if us >= 0.5 else "" for us, calls in cells)])
    steps = [data["modes"][mode]["decode"][batch] for mode, batch in columns]
    rows.append(["**all kernels**", *(f"**{step['kernels_ms'] * 1e3:,.0f}**" for step in steps)])
    rows.append(["the step, by the clock", *(f"{step['ms'] * 1e3:,.0f}" for step in steps)])
    headers = [f"{'the defaults' if mode == BEST else 'hooked, decode whole'}, batch {batch}" for mode, batch in columns]
    return markdown_table(["us (launches)", *headers], rows)


def bounds(data: Any, _: Any) -> str:
    """What each of the passes that help small steps gains, and what is left to gain at batch 1."""
    modes = data["modes"]
    first, *_middle, last = _profiled(data, BEST)
    best = modes[BEST]["decode"]
    kv = (best[last]["floor_ms"] - best[first]["floor_ms"]) / (int(last) - int(first))
    weights = best[first]["floor_ms"] - int(first) * kv

    def gains(name: str, without: str) -> str:
        """Of the steps, and of the prompts, of two modes."""
        steps = ", ".join(
            f"{1 - step['ms'] / modes[without]['decode'][batch]['ms']:+.1%} at batch {batch}"
            for batch, step in modes[name]["decode"].items()
        )
        prompts = ", ".join(
            f"{1 - step['ms'] / modes[without]['extend'][n]['ms']:+.1%} of a prompt of {int(n):,}"
            for n, step in modes[name]["extend"].items()
        )
        return f"{steps}, and {prompts}"

    lines = [
        f"- **Batch {first}**: reading all weights at the measured bandwidth takes {weights:.2f} ms of {best[first]['ms']:.2f}.",
        f"- **Early launches** save {gains(BEST, 'full_one_row')}.",
    ]
    if (check := modes[BEST].get("address_check_us")) is not None:
        lines.append(f"- **The address check** takes {check:.0f} us of the host's time before each replay.")
    return "\n".join(lines)


def start(data: Any, startup: Any) -> str:
    """Seconds from a loaded model to its first token."""
    found = {when: startup[when]["startup"][BEST] for when in ("cold", "warm")}
    parts = {
        "trace, proofs, self-check, compile": "model",
        "graphs and KV pool": "graphs and pool",
        "all, to the first token": "first_token",
    }
    rows = [[words, *(f"{found[when][key]:.1f}" for when in found)] for words, key in parts.items()]
    return markdown_table(["seconds", "cold", "warm"], rows)


def report(_: Any, startup: Any) -> str:
    """The lines of `explain` on the GPU."""
    return "\n".join(["```", *startup["warm"]["startup"][BEST]["capture"], "```"])


def goals(data: Any, startup: Any) -> str:
    first, *_middle, last = _profiled(data, BEST)
    steps, mib = data["modes"][BEST]["decode"], data["modes"][BEST]["graph_mib"]
    above = steps[first]["ms"] / steps[first]["floor_ms"] - 1
    over = steps[last]["ms"] / steps[last]["kernels_ms"] - 1
    seconds = {when: startup[when]["startup"][BEST]["first_token"] for when in ("cold", "warm")}
    rows = [
        [f"decode at batch {first} at most 8 % above the floor", f"{above:.0%} above", above <= 0.08],
        [f"a step at batch {last} at most 10 % above its kernels", f"{over:.1%} above", over <= 0.1],
        ["cold start, to the first token, under 60 s", f"{seconds['cold']:.1f} s", seconds["cold"] < 60],
        ["warm start under 15 s", f"{seconds['warm']:.1f} s", seconds["warm"] < 15],
        ["graphs under 1 GB", f"{mib:,.0f} MiB for the sizes above", mib * 2**20 < 1e9],
    ]
    return markdown_table(["goal", "measured", "reached"], [[goal, got, "yes" if met else "no"] for goal, got, met in rows])


TABLES = {
    make.__name__: make for make in (report, conditions, decode, prompts, kernels, bounds, start, goals)
}  # by the names of their marks


def with_tables(text: str, data: Any, startup: Any) -> str:
    """The page with every table as the figures have it now; ValueError without their marks."""
    return marked_tables.with_tables(text, {name: make(data, startup) for name, make in TABLES.items()}, "docs/capture_figures.md")


def main() -> None:
    data, startup = read("capture.json"), read("capture_startup.json")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), data, startup), encoding="utf-8")


def _modes(data: Any) -> list[tuple[str, str, str, Any]]:
    """The measured modes in a fixed order: name, words, settings, figures."""
    known = [name for name in MODES if name in data["modes"]] + [name for name in data["modes"] if name not in MODES]
    found = []
    for name in known:
        words, settings = MODES.get(name, (name, ""))
        found.append((name, words, settings if settings in ("", "the defaults") else f"`{settings}`", data["modes"][name]))
    return found


def _profiled(data: Any, mode: str) -> list[str]:
    """The batches whose kernels were listed."""
    return [batch for batch, step in data["modes"].get(mode, {"decode": {}})["decode"].items() if "kernels_ms" in step]


def _by_kind(step: Any) -> dict[str, tuple[float, int]]:
    """Microseconds and launches of each kind; the kernels that are not listed by name count as all else, without launches."""
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for kernel in step["top"]:
        us, calls = found[kind := _kind(kernel["name"])]
        found[kind] = us + kernel["us"], calls + kernel["calls"]
    us, _ = found[REST]
    found[REST] = us + step["kernels_ms"] * 1e3 - sum(kernel["us"] for kernel in step["top"]), 0
    return found


def _kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), REST)


if __name__ == "__main__":
    main()
