"""The real tensors behind a graph's placeholders, with a note of which of them were looked at."""

from __future__ import annotations

from typing import Any

from torch import fx


class ReadValues(dict[fx.Node, Any]):
    """A dict that keeps in `read` whose values somebody took: what a proof says depends on those tensors' numbers, and on no others'."""

    def __init__(self, values: dict[fx.Node, Any]) -> None:
        super().__init__(values)
        self.read: set[fx.Node] = set()

    def __getitem__(self, node: fx.Node) -> Any:
        self.read.add(node)
        return super().__getitem__(node)

    def get(self, node: fx.Node, default: Any = None) -> Any:
        self.read.add(node)
        return super().get(node, default)

    def items(self) -> Any:
        self.read.update(self)
        return super().items()

    def values(self) -> Any:
        self.read.update(self)
        return super().values()
