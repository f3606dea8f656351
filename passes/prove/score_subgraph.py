"""What lies between the products q.k and the softmax: which nodes work on scores, which make masks, and what they are made from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.find.attention_site import module_path
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import op_name, reached, shape_at, token_dims, value_of
from paged_attn.passes.fx.mask_literals import SMALL_TENSOR
from paged_attn.passes.fx.memory import writers_of
from paged_attn.passes.fx.slicing import ancestors
from paged_attn.passes.fx.token_data import read_inputs

# Elementwise arithmetic. On scores, its numbers are scales and caps, which `score_function` proves on values.
_ARITHMETIC = {"mul", "imul", "multiply", "div", "truediv", "itruediv", "true_divide", "divide", "tanh", "add", "iadd", "sub", "isub",
               "rsub", "neg"}  # fmt: skip
# Table lookups and matrix products. Applied to token ids they give the model's hidden state, not a mask.
_INDEXING = {"getitem", "index", "gather", "take", "take_along_dim", "index_select", "embedding"}
LOOKUPS = {"embedding", "linear", "matmul", "bmm", "addmm", "conv1d", "index_select", "einsum"}


def score_path(nodes: list[fx.Node], *products: fx.Node) -> set[fx.Node]:
    """The nodes whose value depends on q.k."""
    found = set(products)
    for node in nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def without_score_arithmetic(nodes: list[fx.Node], products: Collection[fx.Node]) -> list[fx.Node]:
    """`nodes` without plain arithmetic on scores; masks stay, and so do operations on scores that may pick positions."""
    path = score_path(nodes, *products)
    return [node for node in nodes if node not in path or (op_name(node) not in _ARITHMETIC and node not in products)]


def factors_of_scores(nodes: list[fx.Node], products: Collection[fx.Node], form: CallForm) -> set[fx.Node]:
    """Values made only of the model's tensors and numbers (a learned temperature, bounded) that are used in plain arithmetic on scores:
    they are the same at all positions, and are proved together with that arithmetic."""
    path = score_path(nodes, *products)
    fixed = set[fx.Node]()
    for node in nodes:
        own = form.roles.get(node) == "owned" if node.op == "placeholder" else all(source in fixed for source in node.all_input_nodes)
        if own and node not in path and isinstance(value_of(node), Tensor) and not token_dims(node, form.num_tokens):
            fixed.add(node)
    found, among = set[fx.Node](), set(nodes)
    for node in reversed(nodes):
        users = node.users.keys() & among
        if node in fixed and all(user in found or (user in path and op_name(user) in _ARITHMETIC) for user in users):
            found.add(node)
    return found


def zeros_for(node: fx.Node, form: CallForm, total: int, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros in the shape of a node's value on a row of `total` tokens."""
    value = value_of(node)
    return torch.zeros(shape_at(node, form.num_tokens, total), dtype=dtype or value.dtype, device=value.device)


def placeholder_value(role: str, value: Any, lengths: Sequence[int], ids: Tensor) -> Any:
    """The value of a graph input for a row of sequences of these lengths with token `ids` [T]; the model's own `value` is unchanged."""
    if role == "tokens":
        return sum(lengths)
    if role == "position_ids":
        return torch.cat([torch.arange(n) for n in lengths])[None].to(value.device, value.dtype)
    return ids[None].to(value.device, value.dtype) if role == "input_ids" else value


class Recomputable(UnsupportedError):
    """No spec describes what an attention computes, but its part of the graph can be recomputed from all tokens of a request.

    Attributes:
        what: why there is no spec, in a few words.
    """

    what = ""


class DependsOnHiddenStates(Recomputable):
    """A mask or bias depends on the tokens' hidden states, so no mask family describes it."""

    what = "mask computed from hidden states"


class MixesHeads(Recomputable):
    """The scores or weights of a head depend on several heads (talking heads)."""

    what = "heads mixed"


class OtherWeights(Recomputable):
    """Weights are made from products of queries and keys by something other than a softmax."""

    what = "weights that no softmax makes"


class MixesTokens(Recomputable):
    """A module of the model, run unchanged, that mixes tokens in an unknown way."""

    what = "a module that mixes tokens in a way of its own"


class MixesNearby(Recomputable):
    """Rows are made of those of a few tokens before, by no attention."""

    what = "a mix of rows"


def refuse_hidden_states(nodes: list[fx.Node], form: CallForm, where: str) -> None:
    """Refuses a mask or bias that is computed from the tokens' hidden states, and so is only known when a step runs.

    Args:
        nodes: everything that it is made from.

    Raises:
        DependsOnHiddenStates: naming the operation.
    """
    from_ids = {node for node in nodes if form.roles.get(node) == "input_ids"}
    tables = {node for node in nodes if form.roles.get(node) == "owned"}
    for node in nodes:
        if not any(source in from_ids for source in node.all_input_nodes):
            if node.all_input_nodes and all(source in tables for source in node.all_input_nodes):
                tables.add(node)
            continue
        from_ids.add(node)
        value = value_of(node)
        read = tables & {*read_inputs(node)} if op_name(node) in _INDEXING else set()
        is_of_table = any(value_of(table).numel() > SMALL_TENSOR for table in read)
        if isinstance(value, Tensor) and (is_of_table or (value.is_floating_point() and op_name(node) in LOOKUPS)):
            raise DependsOnHiddenStates(
                f"{where}: its mask or bias is computed from the tokens' hidden states "
                f"({op_name(node)} in {module_path(node) or node.name}), which a paged batch does not have for past tokens"
            )


def needed_for_values(result: fx.Node, user: fx.Node, stops: Collection[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
    """(nodes on whose values `result` depends before `user`, tensors of which only the shape matters).

    `stops` are included, but not followed further.
    """
    nodes = ancestors(result, user, frozenset(stops))
    inside, writers = set(nodes), writers_of(nodes)

    def read(node: fx.Node) -> set[fx.Node]:
        return {*read_inputs(node), *(n for n in node.all_input_nodes if not isinstance(value_of(n), Tensor))}

    needed = {*reached([result], lambda node: inside & {*writers.get(node, ()), *(() if node in stops else read(node))})}
    shapes = {each for node in needed.difference(stops) for each in {*node.all_input_nodes} - read(node)}
    return [node for node in nodes if node in needed or node in shapes], shapes - needed
