"""Traces each block that computes experts as its own operations around one op."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from paged_attn.calling.left_as_it_was import replaced_forward
from paged_attn.engine.tracing.experts_as_ops import kind_of
from paged_attn.engine.tracing.experts_layout import MovableWeights, is_hooked
from paged_attn.engine.tracing.looping.calls import BlockCall, NotProved, OtherCall, calls_of
from paged_attn.engine.tracing.looping.product_weights import LISTS, holders_in
from paged_attn.engine.tracing.looping.prove import ProvedBlock, proved_block
from paged_attn.engine.tracing.looping.stacked_pair import holds_one_stack, pair_within
from paged_attn.hashing.code_files import made_of

logger = logging.getLogger("paged_attn")


@contextmanager
def looping_experts_as_ops(
    model: nn.Module,
    inputs: Callable[[int], dict[str, Any]],
    backend: str = "auto",
    left: dict[str, str] | None = None,
    on_all: Collection[str] = (),
) -> Iterator[dict[str, str]]:
    """Inside, while torch.compile traces, every block that is proved takes its experts' weights stacked.

    The value has their paths, and the names of the code that stands in their places.
    The graph stacks them, and the pass `experts` has the parameters lie that way instead.

    Args:
        inputs: those of a call of the model with so many tokens.
        on_all: paths of modules that run on all tokens of a request, in which nothing is looked for.
        left: is told of the blocks that stay as they are: by path, what they are and why.

    Raises:
        ValueError: `backend` is unknown.
        UnsupportedError: it cannot compute a layer of this model.
    """
    lists = [found for found in blocks_of(model) if not any(_around(path, found[0]) for path in on_all)]
    holders = [found for found in holders_in(model) if not any(_around(path, found[0][0]) for path in on_all) and not _is_op(found[0][1])]
    blocks = {block for _, block, _ in lists} | {module for around in holders for _, module in around}
    finder = _Finder(backend, calls_of(model, [*blocks], inputs) if blocks else {}, MovableWeights(model))
    with ExitStack() as undo:
        for name, block, experts in lists:
            finder.attempt(name, block, experts, undo)
        for around in holders:
            holder = around[0][1]
            is_op = _is_op(holder)  # now: a block inside may have become one
            for name, block in around:
                if finder.is_left(name) and not is_op:
                    finder.attempt(name, block, (holder,), undo)
        stay = finder.left()
        for name, (kind, reason) in stay.items():
            logger.info("%s (%s) stays as it is: %s", name, kind, reason)
        if left is not None:
            left.update({name: f"{kind}: {reason}" for name, (kind, reason) in stay.items()})
        undo.enter_context(made_of({file for each in finder.proved_blocks() for file in each.files}, finder.put.values()))
        yield finder.put


class _Finder:
    """Replaces the forwards of blocks that are proved.

    Attributes:
        put: their paths, and the names of the code that stands in their places.
    """

    def __init__(self, backend: str, calls: Mapping[nn.Module, BlockCall | str], weights: MovableWeights) -> None:
        self._backend, self._calls, self._weights = backend, calls, weights
        self._proved: dict[Any, ProvedBlock | NotProved] = {}
        self._reasons: dict[str, tuple[str, NotProved]] = {}
        self.put: dict[str, str] = {}

    def is_left(self, name: str) -> bool:
        """Whether neither the block of that path, nor one in or around it, has been replaced."""
        return not any(_around(put, name) for put in self.put)

    def attempt(self, name: str, block: nn.Module, experts: Sequence[nn.Module], undo: ExitStack) -> None:
        """Until `undo` is closed the block is replaced, if it is proved; else the reason is kept."""
        try:
            known = self._known(name, block, experts)
        except NotProved as reason:
            self._reasons.setdefault(name, (type(block).__name__, reason))
            return
        undo.enter_context(replaced_forward(block, _emitter(block, experts, self._call(block), known)))
        self.put[name] = known.program.code_name

    def _call(self, block: nn.Module) -> BlockCall:
        call = self._calls[block]
        if isinstance(call, str):
            raise OtherCall(call)
        return call

    def _known(self, name: str, block: nn.Module, experts: Sequence[nn.Module]) -> ProvedBlock:
        call = self._call(block)
        if hooked := hooked_within(block):
            raise NotProved(f"{hooked} has hooks or a forward of its own")
        if len(experts) > 1 and not all(map(holds_one_stack, experts)):
            _refuse(self._weights.other_kind(weight for expert in experts for weight in expert.parameters()))
        key = (kind_within(block), call, len(experts))
        known = self._proved.get(key)
        if known is None:
            known = self._proved[key] = _attempt(block, experts, call, self._backend)
            if isinstance(known, ProvedBlock):
                what, by = known.mlp.spec.describe(), known.backend.describe()
                logger.info("%s (%s) is an op of %s, by %s", name, type(block).__name__, what, by)
        if isinstance(known, NotProved):
            raise known
        moved = [column for column in known.mlp.columns(experts) if len(column) > 1]
        _refuse(self._weights.other_kind(weight for column in moved for weight in column))
        _refuse(self._weights.shared(moved))
        return known

    def proved_blocks(self) -> list[ProvedBlock]:
        return [known for known in self._proved.values() if isinstance(known, ProvedBlock)]

    def left(self) -> dict[str, tuple[str, NotProved]]:
        """Blocks that stay as they are, their classes and the reasons. Of blocks around each other it is the first that could be tried."""
        found: dict[str, tuple[str, NotProved]] = {}
        for name, known in sorted(self._reasons.items(), key=lambda each: isinstance(each[1][1], OtherCall)):
            if self.is_left(name) and not any(_around(one, name) for one in found):
                found[name] = known
        return {name: found[name] for name in self._reasons if name in found}


def _is_op(holder: nn.Module) -> bool:
    return any("forward" in vars(part) for part in holder.modules())


def _around(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _refuse(reason: str) -> None:
    if reason:
        raise NotProved(reason)


def _attempt(block: nn.Module, experts: Sequence[nn.Module], call: BlockCall, backend: str) -> ProvedBlock | NotProved:
    try:
        return proved_block(block, experts, call, backend)
    except NotProved as reason:
        return reason


def _emitter(block: nn.Module, experts: Sequence[nn.Module], call: BlockCall, found: ProvedBlock) -> Callable[..., Any]:
    original, program, mlp = block.forward, found.program.gm, found.mlp
    owners = [(block.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in found.program.owned]
    columns = mlp.linears(experts)

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = call.tensors_of(args, kwargs) if torch.compiler.is_compiling() else None
        if given is None:
            return original(*args, **kwargs)
        return program(*given, *[getattr(owner, name) for owner, name in owners], *mlp.stacked(*columns))

    return forward


def blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Paths, blocks and their experts: two or more modules that are built alike, of two or three linear layers and nothing else.

    A list that is called itself is the block; else it is the module that has the list. Or two modules with a stacked weight each.
    """
    for name, module in model.named_modules():
        if name and isinstance(module, LISTS) and type(module) not in LISTS:
            lists = [tuple(module.children())]
        elif name and not isinstance(module, LISTS):
            lists = [tuple(child.children()) for child in module.children() if type(child) in LISTS]
        else:
            continue
        lists = [experts for experts in lists if _may_be_experts(experts)]
        if len(lists) == 1:
            yield name, module, lists[0]
        elif not lists and (pair := pair_within(module)) is not None:
            yield name, module, pair


def _may_be_experts(modules: Sequence[nn.Module]) -> bool:
    if len(modules) < 2 or len(set(map(id, modules))) < len(modules):
        return False
    kinds = {kind_within(module) for module in modules}
    linears = [name for name, module in modules[0].named_modules() if type(module) is nn.Linear]
    return len(kinds) == 1 and len(linears) in (2, 3) and "" not in linears


def kind_within(module: nn.Module) -> tuple[Any, ...]:
    """What makes two modules compute the same apart from their weights, submodules and all, as far as can be said without running them."""
    return tuple((name, *kind_of(part), _functions(part)) for name, part in module.named_modules())


def _functions(module: nn.Module) -> tuple[tuple[str, int], ...]:
    """Attributes that are not data and can be called: who has others computes something else."""
    return tuple((name, id(value)) for name, value in vars(module).items() if callable(value) and not isinstance(value, type))


def hooked_within(module: nn.Module) -> str:
    """The path of a part that has hooks or a replaced forward; empty if there is none."""
    return next((name or "itself" for name, part in module.named_modules() if is_hooked(part)), "")
