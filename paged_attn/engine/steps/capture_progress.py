"""A progress bar while graphs are captured: shapes, megabytes, seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paged_attn.capture.graphs.graph_set import MIB, GraphKey, GraphSet
from paged_attn.capture.graphs.progress import bar


def show_progress(graphs: GraphSet, what: str) -> Any:
    """A function (keys, total) that passes the keys on and shows where the capture is."""

    def show(keys: Iterator[GraphKey], total: int) -> Iterator[GraphKey]:
        with bar(keys, total=total, what=f"capturing {what}", unit="shape") as shown:
            for key in shown:
                shown.set_postfix_str(f"{key}, {graphs.nbytes / MIB:,.0f} MiB")
                yield key

    return show
