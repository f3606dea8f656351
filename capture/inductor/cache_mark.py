"""Makes our changes to Inductor's code part of the key of Inductor's own disk cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import fx


@contextlib.contextmanager
def marked(change: str) -> Iterator[None]:
    """Inside, Inductor's cache takes nothing that was compiled without `change`, and nothing else takes what is compiled here.

    Inductor keys the user's pass over the graph by the name that it gives itself; here that name is longer. Marks inside marks add up.
    """
    from torch._inductor import config  # not at the top: importing Inductor takes a second, and most processes do not need it
    from torch._inductor.custom_graph_pass import CustomGraphPass

    present: Any = config.post_grad_custom_post_pass
    if present is not None and not isinstance(present, CustomGraphPass):
        yield  # a pass without a name, with which Inductor caches nothing
        return

    class Mark(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            if present is not None:
                present(graph)

        def uuid(self) -> Any:
            mine, theirs = f"paged_attn: {change}", None if present is None else present.uuid()
            return mine if present is None else theirs and (theirs, mine)  # nothing is cached with a pass that gives no name

    with config.patch({"post_grad_custom_post_pass": Mark()}):
        yield
