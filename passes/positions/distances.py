"""The numbers of a graph that may be distances between tokens that it mixes: `F.pad(x, (0, 0, 700, 0))`, `arange(T) - 700`, `dilation=700`.

With fewer tokens such an operation takes in nothing but padding, so that every row looks like one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx

from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import LINEARS, argument_of, depends_on, op_name, value_of
from paged_attn.passes.fx.mask_literals import is_size, numbers_in

_PARTS = {"split", "chunk", "split_with_sizes", "tensor_split", "unbind", "narrow", "select", "slice"}  # along the dim that they name


def distances(graph: fx.Graph, form: CallForm, sizes: Iterable[int], least: int, most: int) -> list[int]:
    """The whole numbers between these two, both included, that may be distances, sorted.

    Args:
        sizes: of the model's tensors: these count only where an operation moves or cuts the tokens themselves.
    """
    known, found = set(sizes), set[int]()
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or node.target in LINEARS or is_size(node):
            continue
        certain, numbers = _numbers_of(node, form)
        whole = {abs(int(number)) for number in numbers if abs(number) < 1 << 40 and number == int(number)}
        found |= {number for number in whole if least <= number <= most and (certain or number not in known)}
    return sorted(found)


def _numbers_of(node: fx.Node, form: CallForm) -> tuple[bool, list[int | float]]:
    """A node's numbers, without those for dims that hold no tokens; and whether the others are for the tokens, for certain."""
    source = node.args[0] if node.args else None
    value, name = value_of(source), op_name(node)
    if isinstance(source, fx.Node) and isinstance(value, Tensor):
        dims = [depends_on(size, form.num_tokens) for size in value.shape]
        if name == "getitem":
            keys = _keys(node.args[1], len(dims))
            return True, [number for key, tokens in zip(keys, dims, strict=False) if tokens for number in numbers_in(key)]
        pads = argument_of(node, 1, "pad")
        if name in ("pad", "constant_pad_nd") and isinstance(pads, (tuple, list)):
            return True, [number for at, amount in enumerate(pads) if dims[-1 - at // 2] for number in numbers_in(amount)]
        dim = argument_of(node, 2 if name in ("split", "chunk", "split_with_sizes", "tensor_split") else 1, "dim", 0)
        if name in _PARTS and isinstance(dim, int) and not dims[dim]:
            return True, []
    return False, list(numbers_in([*node.args, *node.kwargs.values()]))


def _keys(given: Any, dims: int) -> list[Any]:
    """What x[given] has for each dim of x: with whole slices for `...`, and without the dims that None makes."""
    keys = [key for key in (given if isinstance(given, tuple) else (given,)) if key is not None]
    if (at := next((at for at, key in enumerate(keys) if key is Ellipsis), None)) is not None:
        keys[at : at + 1] = [slice(None)] * (dims - len(keys) + 1)
    return keys
