"""What we change about Inductor's code is part of the key under which its own cache on disk keeps that code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import fx


@contextlib.contextmanager
def marked(change: str) -> Iterator[None]:
    """Inside, Inductor's cache takes nothing that was compiled without `change`, and nothing else takes what is compiled here.

    Inductor keys a pass of the user's by its name, so this is a pass that changes nothing; marks inside marks add up. A pass that is there
    already keeps its place.
    """
    from torch._inductor import config

    present = config.post_grad_custom_post_pass
    before = getattr(present, "changes", ()) if present is not None else ()
    if present is not None and not before:
        yield
        return
    with config.patch({"post_grad_custom_post_pass": _mark((*before, change))}):
        yield


def _mark(changes: tuple[str, ...]) -> Any:
    """Made here, as Inductor takes a second to import and most processes need none of it."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Mark(CustomGraphPass):
        def __init__(self) -> None:
            self.changes = changes

        def __call__(self, graph: fx.Graph) -> None:
            pass

        def uuid(self) -> str:
            return "paged_attn: " + ", ".join(changes)

    return Mark()
