"""Proves what an attention with three queries per token computes, and finds out which query meets which keys.

Everything between the products q.k and the output is evaluated on chosen products and values. First it is found which rows each of the
three queries changes: only rows after the first chunk see the previous chunk, and only those after the second see chunks farther back. This
shows which query is which and how long a chunk is. Then products and values are random, and the output must be that of the formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.specs.dual_chunk import PARTS
from paged_attn.passes.find.attention_site import AttentionSite, DualChunkScores
from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import shape_at, value_of
from paged_attn.passes.fx.slicing import operation_limit
from paged_attn.passes.prove.score_subgraph import Recomputable, score_path
from paged_attn.passes.prove.subgraph_probe import SubgraphProbe

MATCH_LENGTHS, CHECK_LENGTHS = (64, 67), (41, 83)  # at the two scales; fit 3 chunks of the largest unscaled number
DIRECT_LENGTH, DIRECT_LIMIT, MOST_ELEMENTS = 130, 2304, 1 << 22  # unscaled check: covers 3 chunks if their scores fit


@dataclass(frozen=True)
class DualChunkProof:
    """How one site's three queries become one output.

    Attributes:
        order: indices of the intra-chunk, successive-chunk and inter-chunk query among the site's queries.
        evidence, declared: shown by `explain`.
    """

    order: tuple[int, ...]
    chunk: int
    scale: float
    evidence: str
    declared: str = ""


class DualChunkProbe(SubgraphProbe):
    """The output of three queries, computed from their products with the keys and from the values.

    Raises:
        UnsupportedError: it also depends on the tokens' hidden states.
    """

    def __init__(self, site: AttentionSite, scores: DualChunkScores, form: CallForm, values: Values) -> None:
        self.products, self.weighted = [product.node for product in scores.products], scores.weighted
        rights = dict.fromkeys(product.right for product in scores.weighted)
        self.order = site.original_order
        self.num_heads = scores.products[0].num_heads
        try:
            super().__init__(scores.output, site.node, form, values, site.where, stops=(*self.products, *rights), products=self.products)
        except Recomputable as reason:
            raise UnsupportedError(f"{reason}; attention with three queries per token is not recomputed") from reason

    def drawn(self, length: int) -> tuple[list[Tensor], Tensor]:
        """Random products and values for a call of `length` tokens, in the graph's own dtypes."""
        draw = torch.Generator().manual_seed(length)
        tensors = []
        for like in map(value_of, (*self.products, self.weighted[0].right)):
            tensors.append(torch.randn(shape_at(like, self.form.num_tokens, length), generator=draw).to(like.device, like.dtype))
        return tensors[:-1], tensors[-1]

    def output(self, products: Sequence[Tensor], values: Tensor, scale: Sequence[int] | None) -> Tensor:
        """[lead.., T, v_dim] in float64."""
        length = products[0].shape[-1]
        given = dict(zip(self.products, products, strict=True)) | {product.right: values for product in self.weighted}
        return self.evaluate((length,), scale, length, given).permute(self.order).double()

    def expected(self, products: Sequence[Tensor], values: Tensor, chunk: int, scale: float) -> Tensor:
        """The result of the formula for products in the order of `PARTS`: [lead.., T, v_dim] in float64."""
        product, length = self.weighted[0], products[0].shape[-1]
        i, j = torch.arange(length, device=values.device)[:, None], torch.arange(length, device=values.device)
        back = i // chunk - j // chunk
        intra, successive, inter = (each.double() for each in products)
        scores = scale * torch.where(back == 0, intra, torch.where(back == 1, successive, inter))
        weights = scores.masked_fill(j > i, -torch.inf).softmax(-1)
        canonical = product.lead + product.row + product.inner
        return torch.einsum(f"{canonical},{product.right_labels}->{product.labels}", weights, values.double())

    def match(self, length: int, scale: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """The indices of the products in the order of `PARTS`, and the chunk length, from the first row that each product changes."""
        products, values = self.drawn(length)
        still = [torch.zeros_like(product) for product in products]
        at_rest, firsts = self.output(still, values, scale), []
        for place, product in enumerate(products):
            moved = self.output([product if each == place else still[each] for each in range(len(products))], values, scale)
            changed = (moved != at_rest).any(-1).flatten(0, -2).any(0)
            firsts.append(int(changed.int().argmax()) if changed.any() else length)
        order = tuple(sorted(range(len(firsts)), key=lambda place: firsts[place]))
        first, chunk, second = sorted(firsts)
        if first != 1 or chunk < 2 or second != 2 * chunk:
            raise self.refusal(f"on {length} tokens its products first count in rows {firsts}, which are not 1, a chunk and two chunks")
        return order, chunk

    def check(self, length: int, scaling: Sequence[int] | None, order: Sequence[int], chunk: int, scale: float) -> float:
        """The largest difference from the formula, relative to the allowed one."""
        products, values = self.drawn(length)
        expected = self.expected([products[place] for place in order], values, chunk, scale)
        got = self.output(products, values, scaling)
        limit = operation_limit(expected, products[0].dtype, values.dtype, value_of(self.result).dtype)
        return float((got - expected).abs().max()) / limit

    def refusal(self, why: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.where}: its scores are made of {len(self.products)} products with the same keys, but not as those of dual chunk "
            f"attention ({', '.join(PARTS)}): {why}. Run this model without paged_attn, or report it."
        )


def prove_dual_chunk(probe: DualChunkProbe) -> DualChunkProof:
    """Raises:
    UnsupportedError: it is not a dual chunk attention; the message names the layer and says what differs.
    CallNotPaged: it depends on an input of this call.
    """
    (order, first), (other, second) = (probe.match(n, scale) for n, scale in zip(MATCH_LENGTHS, probe.scales, strict=True))
    chunk = probe.unscaled(first, second)
    if order != other or chunk is None:
        raise probe.refusal(
            f"two probes show chunks of {first} and {second}, in the orders {order} and {other}, which no number in it explains"
        )
    if strange := [str(each) for each in probe.literals if abs(each - chunk) > 2] + probe.hidden():
        others = ", ".join(strange)
        raise probe.refusal(f"besides its chunks of {chunk} its graph holds {others}, which small probes cannot show to be harmless")
    scale = min(_numbers(probe), key=lambda each: probe.check(MATCH_LENGTHS[0], probe.scales[0], order, first, each))
    longest = min(DIRECT_LIMIT, math.isqrt(MOST_ELEMENTS // probe.num_heads))
    direct = min(longest, max(DIRECT_LENGTH, 3 * chunk + 2))
    checks = [*zip((*MATCH_LENGTHS, *CHECK_LENGTHS), 2 * probe.scales, 2 * (first, second), strict=True), (direct, None, chunk)]
    for length, scaling, seen in checks:
        if not probe.check(length, scaling, order, seen, scale) <= 1:
            raise probe.refusal(f"with chunks of {seen} and scale {scale:.4g} its output on {length} tokens is another than the formula's")
    evidence = f"output evaluated on {len(checks)} probes = softmax of {', '.join(PARTS)} products, chunk {chunk}, scale {scale:.4g}"
    return DualChunkProof(order, chunk, scale, f"{evidence}; {len(probe.nodes)} nodes")


def _numbers(probe: DualChunkProbe) -> list[float]:
    """Candidates for the scale: 1, the numbers in the arithmetic on the products, and their reciprocals."""
    path = score_path(probe.nodes, *probe.products)
    found = [float(each) for node in path for each in (*node.args, *node.kwargs.values()) if isinstance(each, (int, float)) and each > 0]
    return sorted({1.0, *found, *(1 / each for each in found)})
