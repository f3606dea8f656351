"""A progress bar while graphs are captured: shapes, megabytes, seconds. On a terminal only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paged_attn.capture.graph_set import MIB, GraphKey, GraphSet


def show_progress(graphs: GraphSet, what: str) -> Any:
    """A function (keys, total) that passes the keys on and shows where the capture is."""

    def show(keys: Iterator[GraphKey], total: int) -> Iterator[GraphKey]:
        from tqdm import tqdm

        with tqdm(keys, total=total, desc=f"capturing {what}", unit="shape", disable=None, leave=False) as bar:
            for key in bar:
                bar.set_postfix_str(f"{key}, {graphs.nbytes / MIB:,.0f} MiB")
                yield key

    return show
