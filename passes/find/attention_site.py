"""One attention found in a graph, before it is rewritten; what every finder returns."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor, fx

from paged_attn.attn_ops.errors import UnsupportedError, UnsupportedModule
from paged_attn.passes.find.products import Product


class UnknownAttention(UnsupportedModule):
    """A softmax over scores of tokens against tokens whose products could not be found, in `module`."""


class OtherTokens(UnsupportedError):
    """An attention over fewer, more or other positions than the tokens of a call are."""


@dataclass(frozen=True)
class SdpaScores:
    """softmax(scale * q.k + mask), as F.scaled_dot_product_attention defines it; the mask is boolean, additive or None."""

    mask: fx.Node | None
    is_causal: bool
    scale: float


@dataclass(frozen=True)
class WrittenScores:
    """weights = softmax(scores), where `scores` is any function of `products`, and the values are multiplied by `weights`.

    Attributes:
        products: q.k [lead.., T, T].
        scores: input of the softmax, [lead.., T, T], with one more column for a sink.
        softmax: the softmax of the scores.
        weights: [lead.., T, T].
        output: the product of weights and values; the graph's attention output before the rewrite.
        lse: the log-sum-exp of the scores [lead.., T] if the graph also uses it (sinks applied to the output), else None.
        of_weights: the weights come from something other than a softmax: `scores` are their logarithm, and a last column holds the
            logarithm of 1 - their sum.
    """

    products: fx.Node
    scores: fx.Node
    softmax: fx.Node
    weights: fx.Node
    output: fx.Node
    lse: fx.Node | None = None
    of_weights: bool = False


@dataclass(frozen=True)
class DualChunkScores:
    """Three queries over the same keys, whose products are combined into one output in any way.

    Attributes:
        products: of the three queries with the keys, in graph order.
        weighted: products of weights with the values: one, or one for each query.
        output: the only node through which the products reach the rest of the graph; the attention output before the rewrite.
        queries: [1, heads, T, dim] nodes, in the order of `products`.
    """

    products: tuple[Product, ...]
    weighted: tuple[Product, ...]
    output: fx.Node
    queries: tuple[fx.Node, ...]


@dataclass(frozen=True)
class ModuleScores:
    """A module of the model computes its output from all tokens in an unknown way; `node` calls it as one op."""


@dataclass(frozen=True)
class NearbyRows:
    """No attention: each row of `node` is made of those of a few tokens before it."""


@dataclass(frozen=True)
class AttentionSite:
    """weights(query @ key^T) @ value, as the graph spells it.

    Attributes:
        node: produces the attention output [1, q_heads, T, v_dim]; replaced by the rewrite.
        query, key, value: [1, heads, T, dim] nodes; key and value may still be repeated over heads.
        scores: how q.k becomes weights.
        found_by: the finder's name in `explain`.
        original: name of the traced graph's node that holds the attention's output.
        original_order: the permutation of that output to [lead.., T, v_dim].
    """

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    scores: SdpaScores | WrittenScores | DualChunkScores | ModuleScores | NearbyRows
    found_by: str
    original: str
    original_order: tuple[int, ...] = (0, 1, 2, 3)

    @property
    def module(self) -> str:
        return module_path(self.node)

    @property
    def where(self) -> str:
        return f"layer at {self.module or self.original}"


def attention_stand_in(query: Tensor, *others: Tensor) -> Tensor:
    """Takes the place of an attention until the op replaces it. Returns an uninitialized output [1, heads, T, v_dim].

    The last of `others` is the value [1, heads, T, v_dim].
    """
    return others[-1].new_empty(*query.shape[:-1], others[-1].shape[-1])


def module_path(node: fx.Node) -> str:
    """Dotted path of the innermost module that made a node: `model.layers.3.self_attn`; "" outside any module."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((entry[0] for entry in reversed(list(stack.values()))), "")
    path = re.sub(r"^(L\['args'\]\[0\]|L\['\w+'\])\.?", "", path)  # `args[0]`: the model's forward has a decorator
    path = re.sub(r"\.?__dict__\['_modules'\]\['([^']+)'\]", r".\1", path)  # the module defines __getattr__
    path = re.sub(r"\.forward\.__closure__\.?.*$", "", path)  # a program that stands in a module's place
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", path)
    path = re.sub(r"^_modules\['([^']+)'\]", r"\1", path)
    return re.sub(r"\[(\d+)\]", r".\1", path).strip(".")


def modules_of(graph: fx.Graph, names: Collection[str]) -> dict[str, str]:
    """Node name -> module path, for those of `names` that are inside a module."""
    wanted = set(names)
    return {node.name: path for node in graph.nodes if node.name in wanted and (path := module_path(node))}
