"""Where the rewritten graph is compared with the one it was made from: at every value that goes from one piece to a later one, and at
what every op between the pieces writes, as far as the original graph computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from paged_attn.capture.split import SplitGraph
from paged_attn.passes.runner import LayerReport, Rewrite


@dataclass(frozen=True)
class Boundary:
    """One value to compare.

    Attributes:
        original: the node of the original graph that computes it; of an op that writes its result, the op.
        layer: the attention whose output it is, or None.
    """

    original: str
    layer: LayerReport | None = None

    def as_written(self, value: Tensor) -> Tensor:
        """The original's value in the layout of the paged op: attention [T, heads, v_dim]; anything else as it is."""
        if self.layer is None:
            return value
        order = self.layer.original_order
        heads_first = value.permute(order).reshape(-1, *_last_two(value, order)) if value.dim() == len(order) else value[0]
        return heads_first.transpose(0, 1)


@dataclass(frozen=True)
class Boundaries:
    """Of one rewritten graph: by submodule of the split graph and place among its results, and by break for what its op writes."""

    results: Mapping[tuple[str, int], Boundary]
    written: Mapping[str, Boundary]

    @classmethod
    def of(cls, found: Rewrite, split: SplitGraph) -> Boundaries:
        results = {
            (name, index): Boundary(found.traced[result])
            for name, names in split.results.items()
            for index, result in enumerate(names)
            if result in found.traced
        }
        by_op = {report.op_node: Boundary(report.original_node, report) for report in found.layers}
        by_op |= {op: Boundary(found.traced[op]) for op in split.op_names if op in found.traced}
        written = {name: by_op[op] for name, op in zip(split.breaks, split.op_names, strict=True) if op in by_op}
        return cls(results, written)

    @property
    def all(self) -> list[Boundary]:
        return [*self.results.values(), *self.written.values()]

    @property
    def names(self) -> frozenset[str]:
        """Of the nodes of the original graph."""
        return frozenset(boundary.original for boundary in self.all)


def _last_two(value: Tensor, order: tuple[int, ...]) -> tuple[int, int]:
    return value.shape[order[-2]], value.shape[order[-1]]
