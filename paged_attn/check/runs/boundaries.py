"""Where the rewritten graph is compared with the one it was made from: at every value that goes from one piece to a later one, and at
what every op between the pieces writes, as far as the original graph computes the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from paged_attn.attn_ops.ops.positions import REQUEST_LENGTHS
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.capture.split.split_graph import SplitGraph
from paged_attn.passes.replace.operand_layout import Operand
from paged_attn.passes.report import LayerReport, Rewrite


@dataclass(frozen=True)
class Boundary:
    """One value to compare.

    Attributes:
        original: the node of the original graph that computes it; for an op that writes its result, the op.
        layer: the attention whose output it is, or None.
        operand: if it is an operand of an attention, the elements that the attention reads.
    """

    original: str
    layer: LayerReport | None = None
    operand: Operand | None = None

    @property
    def is_of_op(self) -> bool:
        """Whether it has the paged op's layout, [T, heads, dim]."""
        return self.layer is not None or self.operand is not None

    def as_written(self, value: Tensor) -> Tensor:
        """The original's value in the paged op's layout: attention [T, heads, v_dim], without zeros behind; other values unchanged."""
        if self.layer is None:
            return value
        order = self.layer.original_order
        if isinstance(self.layer.spec, LatentSpec):
            value = value[..., : self.layer.spec.value_dim]
        if value.dim() != len(order):
            return value[0].transpose(0, 1)
        heads_first = value.permute(order)
        return heads_first.reshape(-1, *heads_first.shape[-2:]).transpose(0, 1)


@dataclass(frozen=True)
class Boundaries:
    """The boundaries of one rewritten graph.

    Attributes:
        results: by (submodule of the split graph, index among its results).
        written: by break, the value that its op writes.
        given: by break, query, key and value of its attention, if known.
        order: the submodules (pieces and breaks) in the order of their calls.
    """

    results: Mapping[tuple[str, int], Boundary]
    written: Mapping[str, Boundary]
    given: Mapping[str, Sequence[Boundary]]
    order: Sequence[str]

    @classmethod
    def of(cls, found: Rewrite, split: SplitGraph) -> Boundaries:
        results = {
            (name, index): Boundary(found.traced[result])
            for name, names in split.results.items()
            for index, result in enumerate(names)
            if result in found.traced
        }
        by_op = {report.op_node: Boundary(report.original_node, report) for report in found.layers}
        # The length of a call is not a value of its tokens, since a later token changes it. Values made of it are compared.
        computed = [op for op, kind in zip(split.op_names, split.ops, strict=True) if kind != REQUEST_LENGTHS._schema.name]
        by_op |= {op: Boundary(found.traced[op]) for op in computed if op in found.traced}
        written = {name: by_op[op] for name, op in zip(split.breaks, split.op_names, strict=True) if op in by_op}
        operands = {report.op_node: [Boundary(each.name, operand=each) for each in report.operands] for report in found.layers}
        given = {name: operands[op] for name, op in zip(split.breaks, split.op_names, strict=True) if operands.get(op)}
        return cls(results, written, given, list(split.results))

    @property
    def all(self) -> list[Boundary]:
        return [*self.results.values(), *self.written.values(), *(each for given in self.given.values() for each in given)]

    @property
    def stages(self) -> dict[str, int]:
        """By node, the index in `order` of the submodule that computes it, or, for an operand that no piece returns, of the one before."""
        rank = {name: index for index, name in enumerate(self.order)}
        found = {each.original: rank[name] - 1 for name, given in self.given.items() for each in given}
        found |= {boundary.original: rank[name] for (name, _), boundary in self.results.items()}
        return found | {boundary.original: rank[name] for name, boundary in self.written.items()}

    @property
    def late(self) -> dict[str, list[str]]:
        """By node of an attention's output, its operands that are written in place until it reads them."""
        late = {name: [each.original for each in given if each.operand and each.operand.late] for name, given in self.given.items()}
        return {self.written[name].original: operands for name, operands in late.items() if operands}

    @property
    def names(self) -> frozenset[str]:
        """The names of the original graph's nodes."""
        return frozenset(boundary.original for boundary in self.all)
