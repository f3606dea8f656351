"""A region of a graph as a separate program, and the proof that no later token changes an earlier row of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.model_code import model_code
from paged_attn.attn_ops.ops.module import MODULE_ON_ALL_TOKENS, module_of
from paged_attn.attn_ops.specs.recompute import RowInput
from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import argument_of, as_traced, depends_on, op_name, symbol, value_of
from paged_attn.passes.fx.memory import writes_in_place
from paged_attn.passes.fx.slicing import attribute_of, operation_limit
from paged_attn.passes.fx.token_data import counts_in_numbers
from paged_attn.passes.recompute.code_numbers import LATEST, first_unproved_length, numbers_in_code
from paged_attn.passes.recompute.region import RecomputeRegion

SHORT, MORE = 17, 12  # tokens of the shortest prefix; tokens added to the longest prefix
LONG = (61, 130, 197, 261)  # further prefixes: numbers made from the number of tokens may begin to change there
RANKS = {"topk", "sort", "argsort", "kthvalue", "msort", "argmax", "argmin"}
FEW = 5  # replaces the number of keys that a sparse attention chooses, if the probes have fewer tokens


class Program:
    """(number of tokens T, rows' tensors, operands) -> [T, heads, v_dim]; used as `RecomputeSpec.program`.

    Attributes:
        owned: the nodes of the original graph that are its operands, in order.
        computes: a digest, equal for programs that compute the same.
    """

    def __init__(self, graph: fx.Graph, owned: Sequence[fx.Node]) -> None:
        graph.lint()
        self.graph, self.owned = graph, tuple(owned)
        self.module = fx.GraphModule({}, graph)
        self.computes = _digest(graph)

    @property
    def chooses(self) -> int | None:
        """The smallest k of its topk calls: a number, or the number in min(k, T)."""
        given = [argument_of(node, 1, "k") for node in self.graph.nodes if op_name(node) == "topk"]
        counts = [count for k in given for count in (k.args if isinstance(k, fx.Node) else (k,)) if type(count) is int]
        return min(counts, default=None)

    @property
    def modules(self) -> list[nn.Module]:
        """Those that it runs unchanged."""
        return [module_of(node.args[2]) for node in self.graph.nodes if node.target is MODULE_ON_ALL_TOKENS]

    @property
    def max_tokens(self) -> int | None:
        """How many tokens it may be run on: their code may compute something else from the next on (LATEST in `code_numbers.py`)."""
        return min((number - 1 for module in self.modules if (number := first_unproved_length(module)) is not None), default=None)

    def __call__(self, length: int, rows: Sequence[Tensor], owned: Sequence[Tensor]) -> Tensor:
        result: Tensor = self.module.forward(length, *rows, *owned)
        return result


def owned_tensors(program: Program, values: Values) -> list[Tensor]:
    """The operands of a program."""
    return [attribute_of(node) if node.op == "get_attr" else values[node] for node in program.owned]


def row_input(node: fx.Node, form: CallForm, page_dtype: torch.dtype) -> RowInput:
    """How the rows of a node are kept in pages of a dtype; a wider dtype takes several elements per value."""
    value = value_of(node)
    (axis,) = (axis for axis, size in enumerate(value.shape) if depends_on(size, form.num_tokens))
    shape = tuple(int(size) for index, size in enumerate(value.shape) if index != axis)
    strides = [as_traced(stride) for stride in value.stride()]
    order = tuple(sorted(range(value.dim()), key=lambda dim: (-strides[dim], dim)))
    width = RowInput(shape, axis, order, value.dtype, 0).width
    return RowInput(shape, axis, order, value.dtype, width * max(1, value.dtype.itemsize // page_dtype.itemsize))


def make_program(region: RecomputeRegion, form: CallForm, values: Values, order: Sequence[int], where: str) -> Program:
    """The region as a graph of its own.

    Args:
        order: the permutation of its output to [lead.., T, v_dim].

    Raises:
        UnsupportedError: it reads the shape of a tensor with a size that depends on T and is not T; or it computes with a number that is
            made from T and changes beyond the lengths that are tried.
    """
    owned = [node for node in region.nodes if form.roles.get(node) == "owned" or node.op == "get_attr"]
    if numbers := [node for node in owned if node.op == "placeholder" and not isinstance(values[node], Tensor)]:
        raise UnsupportedError(f"{where}, which also depends on a number of the module, {numbers[0].name}")
    _refuse_late_numbers(region, form, where)
    graph = fx.Graph()
    length = graph.placeholder("length")
    made = {node: graph.placeholder(f"row_{index}") for index, node in enumerate(region.rows)}
    made |= {node: graph.placeholder(f"owned_{index}") for index, node in enumerate(owned)}
    made |= {node: _shaped_like(graph, node, length, form.num_tokens, where) for node in region.shapes}
    for node in region.nodes:
        role = form.roles.get(node, "")
        if role == "tokens":
            made[node] = length
        elif role == "position_ids":
            value = value_of(node)
            positions = graph.call_function(torch.arange, (length,), {"dtype": value.dtype, "device": value.device})
            made[node] = graph.call_method("unsqueeze", (positions, 0))
        elif node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    result = graph.call_method("permute", (made[region.output], tuple(order)))
    width = int(value_of(region.output).shape[order[-1]])
    result = graph.call_method("reshape", (result, (-1, length, width)))
    graph.output(graph.call_method("transpose", (result, 0, 1)))
    return Program(graph, owned)


def _refuse_late_numbers(region: RecomputeRegion, form: CallForm, where: str) -> None:
    """Raises UnsupportedError for numbers like max(1, T / 2048), which enter the arithmetic and first change where no probe shows it."""
    for node in region.nodes:
        for count in counts_in_numbers(node, form):
            expression = value_of(count).node.expr
            if not expression.is_polynomial(form.num_tokens) and any(abs(number) > LONG[0] for number in expression.atoms(sympy.Number)):
                raise UnsupportedError(
                    f"{where}, and {node.name} computes with {count.name} = {expression}, which is made from the number of tokens of a "
                    "call: beyond that many tokens a later token may change the result of an earlier one, so that the model cannot "
                    "generate token by token"
                )


def _shaped_like(graph: fx.Graph, node: fx.Node, length: fx.Node, tokens: Any, where: str) -> fx.Node:
    value = value_of(node)
    sizes: list[Any] = [length if symbol(size) == tokens else size for size in value.shape]
    if any(depends_on(size, tokens) for size in sizes if size is not length):
        raise UnsupportedError(
            f"{where}, in the shape of {node.name}, {list(value.shape)}; a size that depends on the number of tokens must be that number"
        )
    known = [size if size is length else int(size) for size in sizes]
    return graph.call_function(torch.zeros, (known,), {"dtype": value.dtype, "device": value.device})


def _digest(graph: fx.Graph) -> str:
    """Equal for graphs that compute the same: covers what each node is made from and, if there are in-place writes, their order."""
    words: dict[fx.Node, str] = {}
    for node in graph.nodes:
        args = fx.map_arg((node.args, dict(node.kwargs)), lambda other: words[other])
        word = repr((node.op, str(node.target), args))
        words[node] = hashlib.sha256(word.encode()).hexdigest()[:16]
    last = words[next(iter(reversed(graph.nodes)))]
    if not any(writes_in_place(node) for node in graph.nodes):
        return last
    return hashlib.sha256("".join(words.values()).encode()).hexdigest()[:16]


def prove_causal(
    program: Program, rows: Sequence[RowInput], owned: Sequence[Tensor], form: CallForm, device: torch.device, where: str,
    longest: int | None = None,
) -> int:  # fmt: skip
    """Runs a program on random rows with and without the last ones: the results for the others must be the same. Returns their number.

    Args:
        longest: the model's number of positions, if known.

    Raises:
        UnsupportedError: a later token changes an earlier row, or the program only runs on the traced number of tokens.
    """
    beginnings, most = [max(SHORT, form.min_tokens)], min([n - MORE for n in (form.max_tokens, longest) if n is not None], default=LATEST)
    late = {number for module in program.modules for number in numbers_in_code(module, LONG[-1] + 1, LATEST)}
    beginnings += [count for count in (*LONG, *sorted(late)) if beginnings[0] < count <= most]
    total = beginnings[-1] + max(MORE, min(beginnings[-1] // 8, most - beginnings[-1]))
    ranks = any(op_name(node) in RANKS for node in program.graph.nodes)
    for each in (program, *_choosing_less(program, beginnings[0])):
        generator = torch.Generator().manual_seed(13)
        given = [torch.randn(total, row.width, generator=generator).to(device, row.dtype) for row in rows]

        def run(count: int, each: Program = each, given: list[Tensor] = given) -> Tensor:
            what = f"{where}, and what must be recomputed does not run on {beginnings[0]} and {total} tokens"
            with model_code(lambda why: UnsupportedError(f"{what}: {why}")), torch.no_grad():
                return each(count, [row.restored(one[:count]) for row, one in zip(rows, given, strict=True)], owned).float()

        whole = run(total)
        limit = operation_limit(whole, *(row.dtype for row in rows))
        if not all(_same(whole, run(count), limit, ranks and count > beginnings[0]) for count in beginnings):
            raise UnsupportedError(
                f"{where}, and a later token changes the result of an earlier one, so that the model cannot generate token by token"
            )
    return total


def _same(whole: Tensor, short: Tensor, limit: float, mostly: bool) -> bool:
    """Whether the rows of a shorter run are those of the whole one; with `mostly`, most of the later half of them, as rounding may decide
    which of many keys are chosen."""
    count = len(short)
    if not mostly:
        return torch.allclose(whole[:count], short, rtol=0, atol=limit, equal_nan=True)
    one, other = whole[count // 2 : count], short[count // 2 :]
    apart = torch.where((one == other) | (one.isnan() & other.isnan()), 0, one - other).abs().nan_to_num(nan=torch.inf)
    return bool(apart.flatten(1).amax(1).median() <= limit)


def _choosing_less(program: Program, few: int) -> list[Program]:
    """The program with FEW for k in its min(k, T), if probes of `few` tokens never reach k; else nothing."""
    graph, found = fx.Graph(), False
    copied: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(program.graph, copied)
    graph.output(output)
    for node in graph.nodes:
        if op_name(node) in ("sym_min", "min") and any(type(a) is int and a >= few for a in node.args):
            node.args = tuple(FEW if type(a) is int and a >= few else a for a in node.args)
            found = True
    return [Program(graph, program.owned)] if found else []
