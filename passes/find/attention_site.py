"""One attention found in a graph, before it is rewritten; what every finder returns."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor, fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.find.products import Product


class UnknownAttention(UnsupportedError):
    """A softmax over scores of tokens against tokens whose products are not found.

    Attributes:
        module: the path of the module that it is in; "" outside any.
    """

    def __init__(self, module: str, words: str) -> None:
        self.module = module
        super().__init__(words)


@dataclass(frozen=True)
class SdpaScores:
    """softmax(scale * q.k + mask), as F.scaled_dot_product_attention says it: mask boolean, additive or None."""

    mask: fx.Node | None
    is_causal: bool
    scale: float


@dataclass(frozen=True)
class WrittenScores:
    """weights = softmax(scores), where `scores` is made from `products` in whatever way, and `weights` is what multiplies the values.

    Attributes:
        products: q.k [lead.., T, T].
        scores: given to the softmax, [lead.., T, T] or wider by sinks.
        softmax: the softmax of the scores.
        weights: [lead.., T, T].
        output: the product of weights and values; the graph's attention output before the rewrite.
        lse: the log-sum-exp of the scores [lead.., T], where the graph uses it besides (sinks applied to the output), or None.
        of_weights: no softmax makes the weights: `scores` are their logarithm, and what they lack of 1 as a last column.
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
    """Three queries over the same keys, whose products become one output in whatever way.

    Attributes:
        products: of the three queries with the keys, in the order of the graph.
        weighted: products of weights with the values: one, or one for each query.
        output: all that is made of the products goes through it; the graph's attention output before the rewrite.
        queries: [1, heads, T, dim] nodes, in the order of `products`.
    """

    products: tuple[Product, ...]
    weighted: tuple[Product, ...]
    output: fx.Node
    queries: tuple[fx.Node, ...]


@dataclass(frozen=True)
class ModuleScores:
    """What a module of the model computes of all tokens, in whatever way; `node` calls it as one op."""


@dataclass(frozen=True)
class AttentionSite:
    """weights(query @ key^T) @ value, as the graph spells it.

    Attributes:
        node: produces the attention output [1, q_heads, T, v_dim]; replaced by the rewrite.
        query, key, value: [1, heads, T, dim] nodes; key and value may still be repeated over heads.
        scores: how q.k becomes weights.
        found_by: the finder's words for `explain`.
        original: name of the node in the traced graph whose value is the attention's output.
        original_order: permutes that output to [lead.., T, v_dim].
    """

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    scores: SdpaScores | WrittenScores | DualChunkScores | ModuleScores
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
    """Holds the place of an attention's output [1, heads, T, v_dim] until the op replaces it; gives a shape, not numbers.

    The last of `others` is the value [1, heads, T, v_dim].
    """
    return others[-1].new_empty(*query.shape[:-1], others[-1].shape[-1])


def module_path(node: fx.Node) -> str:
    """Dotted path of the innermost module that made a node: `model.layers.3.self_attn`, or "" outside any."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((entry[0] for entry in reversed(list(stack.values()))), "")
    path = re.sub(r"^(L\['args'\]\[0\]|L\['\w+'\])\.?", "", path)  # `args[0]`: of a decorator around the model's forward
    path = re.sub(r"\.?__dict__\['_modules'\]\['([^']+)'\]", r".\1", path)  # the module has its own __getattr__
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", path)
    path = re.sub(r"^_modules\['([^']+)'\]", r"\1", path)
    return re.sub(r"\[(\d+)\]", r".\1", path).strip(".")


def modules_of(graph: fx.Graph, names: Collection[str]) -> dict[str, str]:
    """The module paths of nodes by their names; nothing for nodes outside any module."""
    wanted = set(names)
    return {node.name: path for node in graph.nodes if node.name in wanted and (path := module_path(node))}
