"""Products in float32 of two tensors in 16 bits become `paged_attn::linear_float32`, which casts neither.

Before: F.linear(x.float(), weight.float(), bias), or by matmul, mm or addmm; x [..., T, K] and weight [N, K] in 16 bits
After:  paged_attn.linear_float32(x, weight, bias)
Left alone: weights that the graph computes or writes to; values that are written to between cast and product; products that have the same
size in every step; and anything that does not give the op's numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor, fx, nn

from paged_attn.attn_ops.ops.linears.linear import LINEAR_FLOAT32
from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import arguments_of, name_of, shape_of, sizes_of, value_of
from paged_attn.passes.fx.memory import bases_of, written_values
from paged_attn.passes.fx.row_layout import MISFITS
from paged_attn.passes.fx.slicing import evaluate_all

# Names of a product's operands, in order, as a function or as a method of the first. The first operand of addmm is its bias.
_OPERANDS = {
    "linear": ("input", "weight", "bias"),
    "matmul": ("input", "other"),
    "mm": ("input", "mat2"),
    "addmm": ("input", "mat1", "mat2"),
}
_CASTS = {"float", "to", "type", "_to_copy"}
_TURNS = {"t", "transpose", "permute", "swapaxes", "swapdims", "adjoint", "contiguous", "getattr"}
_HALVES = (torch.bfloat16, torch.float16)
_PROBED_ROWS = (1, 5)
_PROBED_OUTPUTS = 64  # most outputs of a weight that are probed: a vocabulary may have very many
_LARGEST = 8  # largest integer in a probe: sums of products are exact in float32, in any order, and do not fit in 16 bits


class _Product(NamedTuple):
    """`nodes`: the casts, the transposition of the weight, and the product, in graph order."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    nodes: list[fx.Node]


def use_linear_float32(graph: fx.Graph, form: CallForm, values: Values) -> int:
    """Rewrites in place; returns how many products became the op."""
    found = [product for node in graph.nodes if (product := _product(node, form, values)) is not None]
    found = [product for product in found if not _is_written(product) and _gives_the_same(product)]
    for product in found:
        product.node.op, product.node.target, product.node.kwargs = "call_function", LINEAR_FLOAT32, {}
        product.node.args = (product.x, product.weight, product.bias)
        for node in reversed(product.nodes):
            if node is not product.node and not node.users:
                graph.erase_node(node)
    return len(found)


def _product(node: fx.Node, form: CallForm, values: Values) -> _Product | None:
    if not _is_float32(node):
        return None
    cast, turned, bias = _operands(node)
    x, between = _behind(cast, frozenset())
    weight, others = _behind(turned, frozenset(_TURNS))
    if x is None or weight is None or form.roles.get(weight) != "owned" or type(values.get(weight)) not in (Tensor, nn.Parameter):
        return None
    if value_of(x).dtype != value_of(weight).dtype or not any(isinstance(size, SymInt) for size in shape_of(x)):
        return None
    outputs = sizes_of(node)[-1:]
    if sizes_of(weight) != (*outputs, *sizes_of(x)[-1:]) or len(sizes_of(x)) < 2:
        return None
    if bias is not None and not (isinstance(bias, fx.Node) and _is_float32(bias) and sizes_of(bias) == outputs):
        return None
    return _Product(node, x, weight, bias, sorted({*between, *others, node}))


def _operands(node: fx.Node) -> tuple[Any, Any, Any]:
    """The input, the weight and the bias of a product; three times None for other nodes, and for products with further arguments."""
    names = _OPERANDS.get(name_of(node), ())
    given = arguments_of(node, names)
    if not names or len(node.args) > len(names) or not given.keys() <= set(names):
        return None, None, None
    first, second, third = (given.get(name) for name in (*names, "")[:3])
    return (second, third, first) if name_of(node) == "addmm" else (first, second, third)


def _behind(value: Any, also: frozenset[str]) -> tuple[fx.Node | None, list[fx.Node]]:
    """The 16-bit tensor of which `value` is a cast to float32, and the nodes in between; `also`: other operations allowed there."""
    casts, nodes = 0, list[fx.Node]()
    while isinstance(value, fx.Node) and value.all_input_nodes == [value.args[0] if value.args else None]:
        source, name = value.args[0], name_of(value)
        assert isinstance(source, fx.Node)
        if name in _CASTS and _widens(source, value):
            casts += 1
        elif name not in also or len(sizes_of(value)) != 2:
            break
        nodes.append(value)
        value = source
        if casts and not also:
            break
    return (value, nodes) if casts == 1 and isinstance(value, fx.Node) else (None, [])


def _widens(source: fx.Node, cast: fx.Node) -> bool:
    value = value_of(source)
    return isinstance(value, Tensor) and value.dtype in _HALVES and _is_float32(cast) and value.device == value_of(cast).device


def _is_float32(node: Any) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and value.dtype == torch.float32


def _is_written(product: _Product) -> bool:
    """Whether an in-place write would make the op read other values than the casts did."""
    weights = bases_of([product.weight])
    read = bases_of([product.x, *product.nodes[:-1]])
    for node in product.node.graph.nodes:
        written = written_values(node)
        if written & weights or (written & read and product.nodes[0] < node < product.node):
            return True
    return False


def _gives_the_same(product: _Product) -> bool:
    """Whether the op's result is bitwise equal on integers, with the kernels of this device, for one row and for several."""
    numbers = torch.Generator().manual_seed(0)
    dtype, device, (outputs, length) = value_of(product.x).dtype, value_of(product.x).device, sizes_of(product.weight)

    def random(*shape: int) -> Tensor:
        return torch.randint(1, _LARGEST + 1, shape, generator=numbers).to(device, dtype)

    weight = random(min(outputs, _PROBED_OUTPUTS), length)
    bias = None if product.bias is None else random(len(weight)).float()
    for rows in _PROBED_ROWS:
        x = random(*(1,) * (value_of(product.x).dim() - 2), rows, length)
        given = {product.x: x, product.weight: weight} | ({} if product.bias is None else {product.bias: bias})
        try:
            expected = evaluate_all(product.nodes, given)[product.node]
        except MISFITS:  # a square weight that is not transposed
            return False
        if not torch.equal(LINEAR_FLOAT32(x, weight, bias), expected):
            return False
    return True
