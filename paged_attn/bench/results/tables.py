"""A record as text: speeds with ratios, latencies, and each system's startup time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paged_attn.bench.systems.systems import OURS

Row = Sequence[str]


def lines(record: dict[str, Any]) -> Iterator[str]:
    """All tables of a record."""
    model = record["model"]
    how = f"{record['decoding']}, seed {record['settings']['seed']}"
    yield f"{record['machine']['device']}, {model['name']}, {model['dtype']}, {how}, {record['date']}"
    ran = [name for name, system in record["systems"].items() if system["timed"]]
    yield "output tokens per second (seconds), median of the repetitions; x: how many times as fast paged_attn was"
    yield from _aligned([["", *ran], *([name, *(_speed(record, name, system) for system in ran)] for name in _names(record))])
    yield ""
    yield "milliseconds to the first token, and between tokens, in one more run: p50 / p90 / p99 over all requests"
    yield from _aligned([["", "", "first token", "between tokens"], *_latencies(record, ran)])
    yield ""
    yield from _aligned([["", "ready after s", "host GiB", "device GiB", "versions"], *(_cost(record, name) for name in ran)])
    if equal := list(_equal(record)):
        yield ""
        yield from equal
    if missed := list(_missed(record)):
        yield ""
        yield from missed


def _names(record: dict[str, Any]) -> list[str]:
    return [workload["name"] for workload in record["workloads"]]


def _speed(record: dict[str, Any], workload: str, system: str) -> str:
    timed = record["systems"][system]["timed"].get(workload)
    if timed is None:
        return "-"
    ratio = record["ratios"].get(system, {}).get(workload)
    return f"{timed['tokens_per_second']:,.1f} ({timed['seconds']:.3f})" + ("" if ratio is None else f" x{ratio:.2f}")


def _latencies(record: dict[str, Any], ran: Sequence[str]) -> Iterator[Row]:
    for workload in _names(record):
        title = workload
        for system in ran:
            if (timed := record["systems"][system]["timed"].get(workload)) is not None:
                yield title, system, _spread(timed["first_token"]), _spread(timed["between_tokens"])
                title = ""


def _spread(seconds: dict[str, float] | None) -> str:
    return "-" if seconds is None else " / ".join(f"{value * 1e3:,.2f}" for value in seconds.values())


def _cost(record: dict[str, Any], name: str) -> Row:
    system = record["systems"][name]
    sizes = ["-" if size is None else f"{size / 2**30:.2f}" for size in (system["host_peak_bytes"], system["device_bytes"])]
    versions = ", ".join(f"{package} {version}" for package, version in system["facts"]["versions"].items())
    return name, f"{system['start_seconds']:.1f}", *sizes, versions


def _equal(record: dict[str, Any]) -> Iterator[str]:
    for peer, shares in record["equal_tokens"].items():
        if shares:
            tokens = [share["tokens"] for share in shares.values()]
            requests = [share["requests"] for share in shares.values()]
            yield (
                f"same greedy tokens from {OURS} and {peer}, up to the first difference in a request: {min(tokens):.1%} to "
                f"{max(tokens):.1%} of them by workload; requests without a difference: {min(requests):.1%} to {max(requests):.1%}"
                + ("" if record["model"]["dtype"] == "float32" else " (in 16 bits near-ties fall either way)")
            )


def _missed(record: dict[str, Any]) -> Iterator[str]:
    for name, system in record["systems"].items():
        if system["failed"] is not None:
            yield f"{name}: {system['failed']}"
        left_out = {**system["skipped"], **system["broken"]}
        for why in dict.fromkeys(left_out.values()):
            yield f"{name} without {', '.join(workload for workload, reason in left_out.items() if reason == why)}: {why}"


def _aligned(rows: Sequence[Row]) -> Iterator[str]:
    """Columns as wide as their widest cell, left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
