"""Proves on numbers that keys and values are computed from one row per token, and finds out where each of their elements comes from.

To find that out, weights and the shared part hold distinct numbers, and each token's latent is 1 in one element and 0 elsewhere: then every
element of a key shows which number of which weight has made it. After that rows and weights are random, and the maps that were found must
give the model's keys and values. No value of the model is read, so layers that are alike are proved once.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from paged_attn.attn_ops.specs.latent import HeadRows
from paged_attn.passes.find.attention_site import AttentionSite, WrittenScores
from paged_attn.passes.find.latent import LatentFinder, LatentSite
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import shape_at, shape_of, value_of
from paged_attn.passes.fx.memory import is_written
from paged_attn.passes.fx.row_layout import MISFITS, with_tokens
from paged_attn.passes.fx.slicing import ancestors, evaluate_all, kind_of, layout_text, operation_limit
from paged_attn.passes.prove.attention import AttentionProof
from paged_attn.passes.prove.score_subgraph import zeros_for

TOKENS = 5  # in each probe
DIGIT = 128  # distinct numbers are probed one digit at a time: integers up to this are exact in every floating-point dtype


class NotLatent(Exception):
    """Why an attention's keys and values stay expanded; the message continues the word "its"."""


@dataclass(frozen=True)
class WeightRows:
    """The numbers of a tensor of the model that make keys or values, as rows of a view [rows, rank] of it.

    Attributes:
        number: which of the site's `owned`.
        rows: which rows of the view.
        column: None if the tensor itself is [rows, rank]; else the distance of a row's numbers in the tensor. The rows are then one apart.
    """

    number: int
    rows: HeadRows
    column: int | None = None

    def view(self, heads: int, dim: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Sizes and strides of the view; None if it is the tensor itself."""
        if self.column is None:
            return None
        return (self.rows.start + (heads - 1) * self.rows.stride + (dim - 1) * self.rows.step + 1, rank), (1, self.column)

    def of(self, tensor: Tensor, heads: int, dim: int, rank: int) -> Tensor:
        """[heads, dim, rank]"""
        view = self.view(heads, dim, rank)
        return self.rows.of(tensor if view is None else tensor.as_strided(*view), heads, dim)


@dataclass(frozen=True)
class LatentMaps:
    """How keys and values are made of the latent and of the part that all heads share.

    Attributes:
        keys, values: of which weights; None if the latent itself is in the keys, and is the values.
        bias: makes what is added to every value, with a rank of 1. A bias of keys adds the same to all scores of a query: it has no effect.
        plain, shared: (first, behind the last) element of keys that come from the latent, and from the shared part; others are constants.
        value_dim: elements of values that come from the latent; those behind are 0.
    """

    keys: WeightRows | None
    values: WeightRows | None
    bias: WeightRows | None
    plain: tuple[int, int]
    shared: tuple[int, int]
    value_dim: int


@dataclass(frozen=True)
class LatentProof:
    site: LatentSite
    maps: LatentMaps

    @property
    def evidence(self) -> str:
        rotated = f" + {self.site.num_rotated} that all heads share" if self.site.num_rotated else ""
        if self.maps.keys is None:
            return f"keys and values evaluated: the values are {self.site.rank} of a token's key{rotated}, the same for all heads"
        biased = ", with a bias" if self.maps.bias is not None else ""
        return f"keys and values evaluated: linear in {self.site.rank} values a token{rotated}, heads in order{biased}"


class LatentProver:
    """Proves the latents of one graph. Create a new one after changing the graph."""

    def __init__(self, graph: fx.Graph, form: CallForm) -> None:
        self.finder, self.form = LatentFinder(graph, form), form
        self._proved: dict[Hashable, LatentMaps | str] = {}

    def prove(self, site: AttentionSite, proof: AttentionProof, pool_dtype: torch.dtype) -> LatentProof | str:
        """The latent that replaces an attention's keys and values, or the reason why they stay: "" if it does not look latent at all."""
        found = self.finder.find(site)
        if isinstance(found, str):
            return found
        types = {value_of(node).dtype for node in (found.latent, *found.owned)}
        if types != {pool_dtype}:
            return f"its latent is of {', '.join(sorted(map(str, types)))}, and pages hold {pool_dtype}"
        if besides := _besides(site, proof):
            return f"its {', '.join(besides)}"
        probe = _Probe(site, found, self.form)
        if probe.is_written_later():
            return "its row is written in place after keys or values were made of it"
        key = probe.key()
        if key not in self._proved:
            self._proved[key] = _proved(probe)
        maps = self._proved[key]
        return maps if isinstance(maps, str) else LatentProof(found, maps)


def _besides(site: AttentionSite, proof: AttentionProof) -> list[str]:
    """What the scores have besides what latent attention computes."""
    family, function = proof.family, proof.function
    besides = {
        "mask is not causal": not family.causal,
        "mask has a window": family.window is not None,
        "mask has chunks": family.chunk is not None,
        "scores have a softcap": function.softcap is not None,
        "scores have sinks": function.has_sinks,
        "scores have a factor for each head": function.by_head is not None,
        "scores have a bias": proof.bias is not None,
        "log-sum-exp is used": isinstance(site.scores, WrittenScores) and site.scores.lse is not None,
    }
    return [words for words, holds in besides.items() if holds]


def _proved(probe: _Probe) -> LatentMaps | str:
    try:
        maps = probe.maps()
        probe.check_on_random_numbers(maps)
    except NotLatent as reason:
        return f"its {reason}"
    except MISFITS as error:
        return f"its keys and values cannot be evaluated by themselves: {error}"
    except KeyError as error:
        return f"its keys and values are made of {error.args[0]}, too"
    return maps


class _Probe:
    """Evaluates the keys and values of one site on given latents, weights and shared parts.

    Attributes:
        rows: the shared part, after the latent if that is in the keys itself.
        starts: the number of the first element of each of `owned` and then `rows`, from 1 on; 0 is what is made of none of them.
    """

    def __init__(self, site: AttentionSite, found: LatentSite, form: CallForm) -> None:
        self.site, self.found, self.form, self.owned = site, found, form, found.owned
        self.rows = ([] if self.owned else [found.latent]) + ([] if found.rotated is None else [found.rotated])
        sizes = [value_of(node).numel() for node in self.owned] + [int(shape_of(node)[-1]) for node in self.rows]
        self.starts = list(itertools.accumulate(sizes, initial=1))
        self.columns = torch.tensor([0, min(1, found.rank - 1), found.rank // 2, found.rank - 1, 0])  # of the latent, one for each token
        self.nodes = ancestors([site.key, site.value], site.node, frozenset([found.latent, *self.owned, *self.rows]), through_shapes=False)
        self.heads = int(shape_of(site.key)[1])

    def is_written_later(self) -> bool:
        """Whether the op would read other rows than the products did."""
        given = {self.found.latent, *self.rows}
        first = min((node for node in self.nodes if not given.isdisjoint(node.all_input_nodes)), default=self.site.node)
        return is_written(given, first, self.site.node)

    def key(self) -> Hashable:
        """Equal for sites whose keys and values are made in the same way."""
        given = {node: number for number, node in enumerate([self.found.latent, *self.owned, *self.rows])}
        # Trap: with strides. Of weights that lie otherwise in memory, other views are the rows.
        told = {
            node: (given.get(node), self.form.roles.get(node), layout_text(value_of(node)))
            for node in self.nodes
            if node in given or node.op == "placeholder"
        }
        return self.nodes.index(self.site.key), self.nodes.index(self.site.value), kind_of(self.nodes, told)

    def maps(self) -> LatentMaps:
        one_hot = F.one_hot(self.columns, self.found.rank).double()
        biased = any(len(product.owned) > 1 for product in self.found.products)
        added = self._sources(0 * one_hot) if biased else None
        biases = [] if added is None else [n for n in range(len(self.owned)) if any(self._is_of(n, each).any() for each in added)]
        key, value = self._sources(one_hot, biases)
        shared = 0, 0
        if self.found.rotated is not None:
            is_shared = self._is_of(len(self.starts) - 2, key)
            shared = _one_part(
                is_shared, "heads differ in which of their elements are shared", "keys hold the shared part in another order"
            )
            expected = torch.arange(self.found.num_rotated) + self.starts[-2]
            if not _equal(key[..., slice(*shared)], expected):
                raise NotLatent("keys hold the shared part in another order, or not as one piece")
            key = key.masked_fill(is_shared, 0)
        order = "have their heads in another order than the rows of one weight"
        plain = _one_part(key > 0, f"keys {order}", f"keys {order}")
        first, value_dim = _one_part(value > 0, f"values {order}", f"values {order}")
        if first:
            raise NotLatent("values have zeros in front")
        key, value = key[..., slice(*plain)], value[..., :value_dim]
        if not self.owned:
            expected = torch.arange(self.found.rank) + 1
            if not _equal(key, expected) or not _equal(value, expected):
                raise NotLatent("keys and values hold the same row in another order")
            return LatentMaps(None, None, None, plain, shared, value_dim)
        bias = None
        if added is not None and bool((added[1] > 0).any()):
            if bool((added[1][..., value_dim:] > 0).any()):
                raise NotLatent("values have a bias where they are not made of the latent")
            bias = self._weight_rows(added[1][..., :value_dim], f"values {order}", torch.zeros_like(self.columns), 1)
        keys, values = (self._weight_rows(each, f"{what} {order}", self.columns) for each, what in ((key, "keys"), (value, "values")))
        return LatentMaps(keys, values, bias, plain, shared, value_dim)

    def _is_of(self, number: int, sources: Tensor) -> Tensor:
        inside: Tensor = (sources >= self.starts[number]) & (sources < self.starts[number + 1])
        return inside

    def _sources(self, latent: Tensor, without: Collection[int] = ()) -> tuple[Tensor, Tensor]:
        """Keys and values [heads, T, dim] as the number of the element that each is made of.

        Args:
            latent: [T, rank] of zeros and ones; not used where the latent is one of `rows`.
            without: those of `owned` that are all 0.
        """
        total, found, unit = self.starts[-1], [torch.zeros((), dtype=torch.int64)] * 2, 1
        at = torch.arange(TOKENS)[:, None] * total
        while unit <= total * (TOKENS if self.rows else 1):
            given: dict[fx.Node, Tensor] = {self.found.latent: latent}
            for node, start, end in zip((*self.owned, *self.rows), self.starts, self.starts[1:], strict=False):
                numbers = torch.arange(start, end)
                given[node] = ((numbers if node in self.owned else numbers + at) // unit % DIGIT).double()
            given |= {self.owned[number]: torch.zeros_like(given[self.owned[number]]) for number in without}
            found = [known + each.long() * unit for known, each in zip(found, self._evaluate(given), strict=True)]
            unit *= DIGIT
        key, value = found
        if self.rows:
            of_row = [each % total >= self.starts[len(self.owned)] for each in found]
            tokens = torch.arange(TOKENS)[:, None]
            if any(not torch.equal(each // total, torch.where(is_row, tokens, 0)) for each, is_row in zip(found, of_row, strict=True)):
                raise NotLatent("keys or values of a token are made of other tokens, or of more than its row")
            key, value = key % total, value % total
        if max(int(each.max()) for each in (key, value)) >= total or min(int(each.min()) for each in (key, value)) < 0:
            raise NotLatent("keys or values of a token are made of more than its row")
        return key, value

    def _weight_rows(self, sources: Tensor, otherwise: str, columns: Tensor, rank: int | None = None) -> WeightRows:
        """The rows that make keys or values [heads, T, dim], whose tokens have the elements `columns` of the latent."""
        heads, _, dim = sources.shape
        rank = self.found.rank if rank is None else rank
        first = int(sources[0, 0, 0])
        number = sum(first >= start for start in self.starts[1:-1])
        stride = int(sources[1, 0, 0]) - first if heads > 1 else 0
        step = int(sources[0, 0, 1]) - first if dim > 1 else rank
        column = int(sources[0, 1, 0]) - first if rank > 1 else 1
        expected = first + torch.arange(heads)[:, None, None] * stride + columns[:, None] * column + torch.arange(dim) * step
        if not torch.equal(sources, expected) or not bool(self._is_of(number, sources).all()) or min(stride, step, column) < 0:
            raise NotLatent(otherwise)
        tensor, start = value_of(self.owned[number]), first - self.starts[number]
        if tensor.dim() == 2 and int(tensor.shape[1]) == rank and column == 1 and not any(each % rank for each in (start, stride, step)):
            return WeightRows(number, HeadRows(start // rank, stride // rank, step // rank))
        if not tensor.is_contiguous():
            raise NotLatent("weight is not contiguous")
        return WeightRows(number, HeadRows(start, stride, step), column)

    def check_on_random_numbers(self, maps: LatentMaps) -> None:
        """Compares keys and values with the proved maps, on random rows and weights."""
        found, generator, heads = self.found, torch.Generator().manual_seed(11), self.heads
        latent = torch.randn(TOKENS, found.rank, generator=generator).double()
        rotated = torch.randn(TOKENS, found.num_rotated, generator=generator).double()
        given = {node: torch.randn(value_of(node).shape, generator=generator).double() for node in self.owned}
        given[found.latent] = latent
        if found.rotated is not None:
            given[found.rotated] = rotated
        made: list[Tensor] = []
        for rows, dim in ((maps.keys, maps.plain[1] - maps.plain[0]), (maps.values, maps.value_dim)):
            if rows is None:
                made.append(latent.expand(heads, -1, -1))
            else:
                made.append(torch.einsum("tr,hdr->htd", latent, rows.of(given[self.owned[rows.number]], heads, dim, found.rank)))
        if maps.bias is not None:
            made[1] = made[1] + maps.bias.of(given[self.owned[maps.bias.number]], heads, maps.value_dim, 1).transpose(1, 2)
        key, value = self._evaluate(given)
        expected_key, expected_value = torch.zeros_like(key), torch.zeros_like(value)
        expected_key[..., slice(*maps.plain)] = made[0]
        expected_key[..., slice(*maps.shared)] = rotated
        expected_value[..., : maps.value_dim] = made[1]
        bias = (key - expected_key)[:, :1]  # the same for all tokens of a head
        for operand, got, expected in ((self.site.key, key - bias, expected_key), (self.site.value, value, expected_value)):
            limit = operation_limit(expected, value_of(operand).dtype)
            if not bool(((got - expected).abs() <= limit).all()):
                raise NotLatent("keys or values are not linear maps of their row")

    def _evaluate(self, given: Mapping[fx.Node, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [heads, T, dim] in float64 on the CPU.

        Args:
            given: the site's rows [T, width] and weights, of any shape.
        """
        values, tokens = dict[fx.Node, Any](), self.form.num_tokens
        for node, numbers in given.items():
            values[node] = numbers.reshape(shape_at(node, tokens, TOKENS)).to(value_of(node).device)
        for node in self.nodes:
            for other in (node, *node.all_input_nodes) if node not in values else ():
                if other not in self.nodes or self.form.roles.get(other) == "tokens":  # of which only the size is read
                    of_size = isinstance(value_of(other), Tensor)
                    values[other] = zeros_for(other, self.form, TOKENS) if of_size else with_tokens(value_of(other), tokens, TOKENS)
        found = evaluate_all(self.nodes, values)
        key, value = (found[operand][0].cpu().double() for operand in (self.site.key, self.site.value))
        return key, value


def _one_part(wanted: Tensor, differs: str, pieces: str) -> tuple[int, int]:
    """(first, behind the last) of the columns of [heads, T, dim] that are wanted, which must be adjacent and the same for all."""
    columns = wanted.flatten(0, 1)
    if not torch.equal(columns.any(0), columns.all(0)):
        raise NotLatent(differs)
    at = columns[0].nonzero()[:, 0].tolist()
    if not at or at != list(range(at[0], at[-1] + 1)):
        raise NotLatent(f"{pieces}, or not as one piece")
    return at[0], at[-1] + 1


def _equal(sources: Tensor, expected: Tensor) -> bool:
    return sources.shape[-1] == len(expected) and torch.equal(sources, expected.expand_as(sources))
