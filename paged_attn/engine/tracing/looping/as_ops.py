"""Traces each block that loops over a list of experts as its own operations around one op."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from paged_attn.calling.left_as_it_was import replaced_forward
from paged_attn.engine.tracing.experts_as_ops import kind_of
from paged_attn.engine.tracing.experts_layout import MovableWeights, is_hooked
from paged_attn.engine.tracing.looping.calls import BlockCall, NotProved, calls_of
from paged_attn.engine.tracing.looping.prove import ProvedBlock, proved_block
from paged_attn.engine.tracing.looping.stacked_pair import holds_one_stack, pair_within
from paged_attn.hashing.code_files import made_of

logger = logging.getLogger("paged_attn")
_LISTS = (nn.ModuleList, nn.ModuleDict)


@contextmanager
def looping_experts_as_ops(model: nn.Module, inputs: Callable[[int], dict[str, Any]], backend: str = "auto") -> Iterator[dict[str, str]]:
    """Inside, while torch.compile traces, every block that is proved takes its experts' weights stacked.

    The value has their paths, and the names of the code that stands in their places.
    The graph stacks them, and the pass `experts` has the parameters lie that way instead.

    Args:
        inputs: those of a call of the model with so many tokens.

    Raises:
        ValueError: `backend` is unknown.
        UnsupportedError: it cannot compute a layer of this model.
    """
    found = list(blocks_of(model))
    calls = calls_of(model, [block for _, block, _ in found], inputs) if found else {}
    weights = MovableWeights(model)
    proved: dict[Any, ProvedBlock | NotProved] = {}
    put: dict[str, str] = {}
    with ExitStack() as undo:
        for name, block, experts in found:
            call = calls[block]
            try:
                if isinstance(call, str):
                    raise NotProved(call)
                if hooked := hooked_within(block):
                    raise NotProved(f"{hooked} has hooks or a forward of its own")
                lie_stacked = all(map(holds_one_stack, experts))
                if not lie_stacked:
                    _refuse(weights.other_kind(weight for expert in experts for weight in expert.parameters()))
                key = (kind_within(block), call)
                known = proved.get(key)
                if known is None:
                    known = proved[key] = _attempt(block, experts, call, backend)
                    if isinstance(known, ProvedBlock):
                        what, by = known.mlp.spec.describe(), known.backend.describe()
                        logger.info("%s (%s) is an op of %s, by %s", name, type(block).__name__, what, by)
                if isinstance(known, NotProved):
                    raise known
                if not lie_stacked:
                    _refuse(weights.shared(known.mlp.columns(experts)))
            except NotProved as reason:
                logger.info("%s (%s) stays as it is: %s", name, type(block).__name__, reason)
                continue
            undo.enter_context(replaced_forward(block, _emitter(block, experts, call, known)))
            put[name] = known.program.code_name
        blocks = [known for known in proved.values() if isinstance(known, ProvedBlock)]
        undo.enter_context(made_of({file for each in blocks for file in each.files}, put.values()))
        yield put


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
        if name and isinstance(module, _LISTS) and type(module) not in _LISTS:
            lists = [tuple(module.children())]
        elif name and not isinstance(module, _LISTS):
            lists = [tuple(child.children()) for child in module.children() if type(child) in _LISTS]
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
