"""Makes our changes to Inductor's code part of the key of Inductor's own disk cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import fx


@contextlib.contextmanager
def marked(change: str) -> Iterator[None]:
    """Inside, Inductor's cache reuses nothing compiled without `change`, and what is compiled here is reused nowhere else.

    Inductor's key includes the name of the user's graph pass; here that name is extended. Nested marks add up.
    """
    from torch._inductor import config  # not at the top: importing Inductor takes a second, and most processes do not need it
    from torch._inductor.custom_graph_pass import CustomGraphPass

    present: Any = config.post_grad_custom_post_pass
    if present is not None and not isinstance(present, CustomGraphPass):
        yield  # with a pass that has no name, Inductor caches nothing anyway
        return

    class Mark(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            if present is not None:
                present(graph)

        def uuid(self) -> Any:
            mine, theirs = f"paged_attn: {change}", None if present is None else present.uuid()
            return mine if present is None else theirs and (theirs, mine)  # with a pass that returns no name, nothing is cached

    with config.patch({"post_grad_custom_post_pass": Mark()}):
        yield
