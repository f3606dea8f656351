"""Proves on numbers that keys and values are computed from one row per token, and finds out where each of their elements comes from.

To find that out, the products are replaced by distinct numbers: the operations after them must only move these, in the same way for every
token. Then rows and weights are random, and the maps that were found must give the model's keys and values.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.specs.latent import HeadRows
from paged_attn.passes.find.attention_site import AttentionSite, WrittenScores
from paged_attn.passes.find.latent import LatentFinder, LatentSite
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import shape_at, shape_of, value_of
from paged_attn.passes.fx.row_layout import MISFITS
from paged_attn.passes.fx.slicing import ancestors, evaluate, operation_limit
from paged_attn.passes.prove.attention import AttentionProof

TOKENS = 5  # in each probe
DIGIT = 128  # distinct numbers are probed one digit at a time: integers up to this are exact in every floating-point dtype


class NotLatent(Exception):
    """Why an attention's keys and values stay expanded; the message continues the word "its"."""


@dataclass(frozen=True)
class LatentProof:
    """Which rows of which weights make keys and values of the latent."""

    site: LatentSite
    weight_k: fx.Node
    weight_v: fx.Node
    keys: HeadRows
    values: HeadRows
    key_dim: int
    value_dim: int
    rotated_first: bool

    @property
    def evidence(self) -> str:
        rotated = f" + {self.site.num_rotated} that all heads share" if self.site.num_rotated else ""
        return f"keys and values evaluated: linear in {self.site.rank} values a token{rotated}, heads in order"


def latent_of(finder: LatentFinder, site: AttentionSite, proof: AttentionProof, pool_dtype: torch.dtype) -> LatentProof | str:
    """The latent that replaces an attention's keys and values, or the reason why they stay: "" if it does not look latent."""
    found = finder.find(site)
    if isinstance(found, str):
        return found
    try:
        _check_scores(site, proof)
        types = {value_of(node).dtype for node in (found.latent, *(each.weight for each in found.products))}
        if types != {pool_dtype}:
            raise NotLatent(f"latent is of {', '.join(sorted(map(str, types)))}, and pages hold {pool_dtype}")
        proved = _maps(site, found, finder.form)
        _check_on_random_numbers(site, proved, finder.form)
    except NotLatent as reason:
        return f"its {reason}"
    except MISFITS as error:
        return f"its keys and values cannot be evaluated by themselves: {error}"
    except KeyError as error:
        return f"its keys and values are made of {error.args[0]}, too"
    return proved


def _check_scores(site: AttentionSite, proof: AttentionProof) -> None:
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
    if told := [words for words, holds in besides.items() if holds]:
        raise NotLatent(", ".join(told))


def _maps(site: AttentionSite, found: LatentSite, form: CallForm) -> LatentProof:
    nodes = [*(each.node for each in found.products), *([] if found.rotated is None else [found.rotated])]
    widths = [int(shape_of(node)[-1]) for node in nodes]
    starts = list(itertools.accumulate(widths, initial=0))
    key, value = (_sources_of(operand, site.node, nodes, starts, form) for operand in (site.key, site.value))
    first_rotated = starts[len(found.products)]
    shared = (key >= first_rotated).all(0)
    if not torch.equal((key >= first_rotated).any(0), shared) or bool((value >= first_rotated).any()):
        raise NotLatent("heads differ in which of their elements are shared")
    count, dim = int(shared.sum()), key.shape[1]
    rotated_first = count > 0 and bool(shared[0])
    part, rest = (slice(count), slice(count, dim)) if rotated_first else (slice(dim - count, dim), slice(dim - count))
    if count != found.num_rotated or not torch.equal(key[:, part], (torch.arange(count) + first_rotated).expand(len(key), -1)):
        raise NotLatent("keys hold the shared part in another order, or not as one piece")
    keys, weight_k = _head_rows(key[:, rest], "keys", found, starts)
    values, weight_v = _head_rows(value, "values", found, starts)
    return LatentProof(found, weight_k, weight_v, keys, values, dim - count, value.shape[1], rotated_first)


def _sources_of(operand: fx.Node, user: fx.Node, given: list[fx.Node], starts: list[int], form: CallForm) -> Tensor:
    """[heads, dim]: for element d of head h its index among the token's elements: all products and the shared part, concatenated."""
    nodes = ancestors(operand, user, frozenset(given))
    numbers = torch.arange(TOKENS * starts[-1]).view(TOKENS, -1)
    found, unit = torch.zeros((), dtype=torch.int64), 1
    while unit <= numbers.numel():
        digits = (numbers // unit % DIGIT).double()
        values: dict[fx.Node, Any] = {
            node: _laid_out(digits[:, start:end], node, form) for node, start, end in zip(given, starts, starts[1:], strict=False)
        }
        found = found + evaluate(nodes, values | _sizes(nodes, form), operand)[0].cpu().long() * unit  # [heads, T, dim]
        unit *= DIGIT
    sources = found - torch.arange(TOKENS)[:, None] * starts[-1]
    if not torch.equal(sources, sources[:, :1].expand_as(sources)) or int(sources.min()) < 0 or int(sources.max()) >= starts[-1]:
        raise NotLatent("keys or values of a token are made of other tokens, or of more than its row")
    return sources[:, 0]


def _head_rows(sources: Tensor, what: str, found: LatentSite, starts: list[int]) -> tuple[HeadRows, fx.Node]:
    heads, dim = sources.shape
    first = int(sources[0, 0])
    number = sum(first >= start for start in starts[1 : len(found.products)])
    stride = int(sources[1, 0]) - first if heads > 1 else 0
    expected = first + torch.arange(heads)[:, None] * stride + torch.arange(dim)
    if not torch.equal(sources, expected) or int(sources.min()) < starts[number] or int(sources.max()) >= starts[number + 1]:
        raise NotLatent(f"{what} have their heads in another order than the rows of one weight")
    return HeadRows(first - starts[number], stride), found.products[number].weight


def _check_on_random_numbers(site: AttentionSite, proof: LatentProof, form: CallForm) -> None:
    """Compares keys and values with the proved maps, on random rows and weights."""
    found, generator = proof.site, torch.Generator().manual_seed(11)
    latent = torch.randn(TOKENS, found.rank, generator=generator).double()
    rotated = torch.randn(TOKENS, found.num_rotated, generator=generator).double()
    weights = {each.weight: torch.randn(value_of(each.weight).shape, generator=generator).double() for each in found.products}
    given: dict[fx.Node, Any] = {found.latent: _laid_out(latent, found.latent, form)}
    given |= {node: weight.to(value_of(node).device) for node, weight in weights.items()}
    if found.rotated is not None:
        given[found.rotated] = _laid_out(rotated, found.rotated, form)
    heads = int(shape_of(site.key)[1])
    keys = torch.einsum("tr,hdr->htd", latent, proof.keys.of(weights[proof.weight_k], heads, proof.key_dim))
    values = torch.einsum("tr,hdr->htd", latent, proof.values.of(weights[proof.weight_v], heads, proof.value_dim))
    shared = rotated.expand(heads, -1, -1)
    keys = torch.cat((shared, keys) if proof.rotated_first else (keys, shared), -1)
    for operand, expected in ((site.key, keys), (site.value, values)):
        nodes = ancestors(operand, site.node, frozenset(given))
        got = evaluate(nodes, given | _sizes(nodes, form), operand)[0].cpu().double()
        limit = operation_limit(expected, value_of(operand).dtype)
        if got.shape != expected.shape or not bool(((got - expected).abs() <= limit).all()):
            raise NotLatent("keys or values are not linear maps of their row")


def _sizes(nodes: list[fx.Node], form: CallForm) -> dict[fx.Node, Any]:
    return {node: TOKENS for node in nodes if form.roles.get(node) == "tokens"}


def _laid_out(rows: Tensor, node: fx.Node, form: CallForm) -> Tensor:
    """Rows [T, width] in the shape of a node's value [.., T, width] and on its device."""
    return rows.reshape(shape_at(node, form.num_tokens, TOKENS)).to(value_of(node).device)
