"""The nodes of one layer in a trace, and copies of them with the weights of another."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import SymInt, Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from paged_attn.engine.tracing.repeated.same_code import THROUGH_MARKS, NotAlike, expression_of, numbers_instead
from paged_attn.passes.fx.graph_tools import sizes_of, source_name, symbol, value_of
from paged_attn.passes.fx.memory import storages_of

NUMBERS = ("layer_id", "module_id")  # op arguments that number a module of the model
Instead = dict[fx.Node, fx.Node]


class Weights:
    """Which graph input is which tensor of which layer.

    Attributes:
        inputs: what the graph is given, in the order of its inputs.
    """

    def __init__(self, graph: fx.Graph, inputs: Sequence[Any], model: nn.Module) -> None:
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self.inputs = list(inputs)
        self._nodes = {id(value): node for node, value in zip(placeholders, inputs, strict=True)}
        self._last = placeholders[-1]
        self.model = model

    def pairs(self, one: str, other: str) -> Instead:
        """For each input that is a tensor of the layer `one`, that of `other`, which the graph has from then on."""
        found: Instead = {}
        here, there = (tensors_of(self.model.get_submodule(name)) for name in (one, other))
        for (path, mine), (_, theirs) in zip(here, there, strict=True):
            if (node := self._nodes.get(id(mine))) is not None:
                source = source_name(node).replace(expression_of(one), expression_of(other))
                instead = self._nodes.get(id(theirs)) or self._new(node, theirs, source)
                _add(found, node, instead, f"{path} of {one} and {other}")
        return found

    def _new(self, like: fx.Node, tensor: Tensor, source: str) -> fx.Node:
        with like.graph.inserting_after(self._last):
            node = self._last = like.graph.placeholder(re.sub(r"\W+", "_", source).lower())
        node.meta["grapharg"] = SimpleNamespace(source=SimpleNamespace(name=source))  # as Dynamo's have it
        node.meta["example_value"] = value_of(like).fake_mode.from_tensor(tensor, static_shapes=True)
        self._nodes[id(tensor)] = node
        self.inputs.append(tensor)
        return node


def tensors_of(layer: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers of a layer by name, also those that it has twice."""
    return [*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False)]


def _add(found: Instead, node: fx.Node, instead: fx.Node | None, what: str) -> None:
    if instead is None or found.setdefault(node, instead) is not instead:
        raise NotAlike(f"{what} do not go to the same places")


@dataclass(frozen=True)
class Call:
    """What a layer is given, as its mark says: tensors, integers, and words for the rest."""

    given: tuple[fx.Node, ...]
    numbers: tuple[Any, ...]
    words: str

    @classmethod
    def of(cls, mark: fx.Node) -> Self:
        given, numbers, words, *_ = mark.args
        return cls(tuple(given), tuple(numbers), words)  # type: ignore[arg-type]

    def pairs(self, other: Self) -> Instead:
        """For each node that this call is given, what the other is given there; but for the first tensor."""
        if (self.words, len(self.given), len(self.numbers)) != (other.words, len(other.given), len(other.numbers)):
            raise NotAlike(f"layers are called differently: {self.words!r} and {other.words!r}")
        found: Instead = {}
        for one, another in zip(self.given, other.given, strict=True):
            if _form(one) != _form(another):
                raise NotAlike(f"layers are given {_form(one)} and {_form(another)}")
        for one, another in zip((*self.given[1:], *self.numbers), (*other.given[1:], *other.numbers), strict=True):
            if isinstance(one, fx.Node):
                _add(found, one, another if isinstance(another, fx.Node) else None, "what layers are given")
            elif one != another:
                raise NotAlike(f"layers are given {one} and {another}")
        return found


def _form(node: fx.Node) -> Any:
    value = value_of(node)
    return sizes_of(node), tuple(symbol(stride) for stride in value.stride()), value.dtype, value.device


@dataclass(frozen=True)
class TracedLayer:
    """The nodes between the marks of a layer.

    Attributes:
        name: in `model.named_modules()`.
        begin: the mark, which the layer takes for its first tensor.
        end: the mark of its result.
    """

    name: str
    begin: fx.Node
    end: fx.Node
    nodes: tuple[fx.Node, ...]

    @classmethod
    def between(cls, name: str, begin: fx.Node, end: fx.Node) -> Self:
        nodes, node = list[fx.Node](), begin.next
        while node is not end:
            if node.op == "root":
                raise NotAlike(f"{name} ends before it begins")
            nodes.append(node)
            node = node.next
        return cls(name, begin, end, tuple(nodes))

    @property
    def result(self) -> fx.Node:
        """What the layer computes."""
        return self.end.args[0]  # type: ignore[return-value]

    def check_nothing_else_is_read_or_left(self, weights: Weights) -> None:
        """Check that it reads what it is given, its own weights and what is no layer's, and leaves nothing but its result."""
        first = Call.of(self.begin).given[0]
        if _form(first) != _form(self.result):
            raise NotAlike(f"{self.name} returns {_form(self.result)}, and its marks say {_form(first)}")
        own = {*self.nodes, self.begin}
        known = {*own, *weights.pairs(self.name, self.name), *Call.of(self.begin).pairs(Call.of(self.begin))}
        for node in self.nodes:
            for read in node.all_input_nodes:
                of_a_layer = source_name(read).startswith(expression_of(self.name)) if read.op == "placeholder" else read.op != "get_attr"
                if read not in known and of_a_layer and not _is_size(read):
                    raise NotAlike(f"{self.name} reads {read}, which it is not given")
            if not _is_size(node) and not own.union([self.end]).issuperset(node.users):
                raise NotAlike(f"{node} of {self.name} is read outside of it")
            if free_unbacked_symbols(value_of(node)):
                raise NotAlike(f"the size of {node} of {self.name} depends on data")

    def check_is(self, other: Self, weights: Weights) -> None:
        """The nodes of another layer that was traced are those that a copy would have."""
        instead = self._instead(Call.of(other.begin), other.begin, other.name, weights)
        numbers = numbers_instead(weights.model, self.name, other.name)
        mine, theirs = ([node for node in layer.nodes if not _is_size(node)] for layer in (self, other))
        if len(mine) != len(theirs):
            raise NotAlike(f"{self.name} and {other.name} have {len(mine)} and {len(theirs)} nodes")
        for one, another in zip(mine, theirs, strict=True):
            expected = _with_numbers(one, numbers, *(fx.map_arg(each, lambda n: instead.get(n, n)) for each in (one.args, one.kwargs)))
            if (one.op, one.target) != (another.op, another.target) or not _equal(expected, (another.args, dict(another.kwargs))):
                raise NotAlike(f"{one.format_node()} of {self.name} is {another.format_node()} in {other.name}")
            instead[one] = another
        if instead.get(self.result, self.result) is not other.result:
            raise NotAlike(f"{self.name} and {other.name} return different values")

    def forget_marks(self) -> None:
        """Its nodes lie in the modules that they would lie in without marks."""
        stack = Renamed(self.name, self.name)
        for node in self.nodes:
            if "nn_module_stack" in node.meta:
                node.meta["nn_module_stack"] = stack.of(node.meta["nn_module_stack"])

    def copy(self, call: Call, name: str, weights: Weights, before: fx.Node, written: Set[int]) -> fx.Node:
        """The result of a copy with what another layer is given, and its weights.

        Args:
            written: storages of fake tensors that copies do not share with the originals, so that what asks who sees a write in place
                finds the right ones. For all of them it would take 66 ms a layer.
        """
        instead = self._instead(call, call.given[0], name, weights)
        memory = _Memory(instead)
        stack, numbers = Renamed(self.name, name), numbers_instead(weights.model, self.name, name)
        with before.graph.inserting_before(before):
            for node in self.nodes:
                if _is_size(node):
                    continue  # a function of the lengths of the call, whichever layer made it
                new = instead[node] = before.graph.node_copy(node, lambda n: instead.get(n, n))
                new.args, new.kwargs = _with_numbers(node, numbers, new.args, new.kwargs)
                if not written.isdisjoint(storages_of([node])):
                    new.meta["example_value"] = pytree.tree_map(memory.copied, value_of(node))
                if "nn_module_stack" in node.meta:
                    new.meta["nn_module_stack"] = stack.of(node.meta["nn_module_stack"])
        return instead.get(self.result, self.result)

    def _instead(self, call: Call, first: fx.Node, name: str, weights: Weights) -> Instead:
        return weights.pairs(self.name, name) | Call.of(self.begin).pairs(call) | {self.begin: first}


def _with_numbers(node: fx.Node, numbers: Mapping[int, int], args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, but of an op that knows a module by a number, with that of another layer's module."""
    named = dict(kwargs)
    if not numbers or not isinstance(node.target, torch._ops.OpOverload):
        return tuple(args), named
    names = [argument.name for argument in node.target._schema.arguments]
    placed = [numbers.get(value, value) if name in NUMBERS else value for name, value in zip(names, args, strict=False)]
    return tuple(placed), {name: numbers.get(value, value) if name in NUMBERS else value for name, value in named.items()}


def _is_size(node: fx.Node) -> bool:
    return isinstance(value_of(node), SymInt)


def _equal(one: Any, other: Any) -> bool:
    (ones, form), (others, other_form) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return form == other_form and all(_same(a, b) for a, b in zip(ones, others, strict=True))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, fx.Node) and isinstance(other, fx.Node) and _is_size(one) and _is_size(other):
        return bool(symbol(value_of(one)) == symbol(value_of(other)))
    return one is other or (type(one) is type(other) and bool(one == other))


class _Memory:
    """Fake tensors for copies: of the same form, in memory of their own, shared as the originals share theirs."""

    def __init__(self, instead: Mapping[fx.Node, fx.Node]) -> None:
        self._bases = dict[int, Tensor]()
        for one, other in instead.items():
            if isinstance(value := value_of(one), Tensor):
                self._bases[_storage(value)] = value_of(other)

    def copied(self, value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value  # a number, or a constant of the graph
        with value.fake_mode:
            base = self._bases.get(_storage(value))
            if base is not None:
                if base.dtype == value.dtype:
                    return torch.as_strided(base, value.shape, value.stride(), value.storage_offset())
                form = value.storage_offset(), value.shape, value.stride()  # complex numbers viewed as pairs, or the reverse
                return torch.empty(0, dtype=value.dtype, device=value.device).set_(base.untyped_storage(), *form)
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        self._bases[_storage(value)] = made
        return made


def _storage(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


class Renamed:
    """The modules around a node of one layer, as those of another, or as they were without marks, which Dynamo goes through."""

    def __init__(self, one: str, other: str) -> None:
        self._one = re.compile(rf"L\['model'\]\.{re.escape(one)}(?:{THROUGH_MARKS})?(?=\.|$)")
        self._other = f"L['model'].{other}"
        self._found = dict[tuple[str, ...], dict[str, Any]]()

    def of(self, stack: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
        key = tuple(stack)
        if key not in self._found:
            self._found[key] = {number: (self._one.sub(self._other, path), kind) for number, (path, kind) in stack.items()}
        return self._found[key].copy()
