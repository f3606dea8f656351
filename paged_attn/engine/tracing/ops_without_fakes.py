"""Custom ops without a fake implementation: torch.compile needs their output shapes, which their authors did not declare.

The shapes are derived from real calls of two lengths and registered with torch during the trace. Such an op is a split point: it runs
unchanged between the pieces, so nothing else needs to be assumed about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._library.custom_ops import OPDEFS
from torch._library.simple_registry import singleton
from torch._library.utils import can_generate_trivial_fake_impl
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paged_attn.attn_ops.replaced_entries import replaced_entries
from paged_attn.capture.split.split_ops import register_split_op
from paged_attn.engine.tracing.module_calls import LENGTHS
from paged_attn.engine.tracing.trace_failure import NotTraced

_KERNELS = (DispatchKey.Meta, DispatchKey.CompositeExplicitAutograd, DispatchKey.CompositeImplicitAutograd)
Call = tuple[list[Tensor], Any]  # the tensors that it was given, and what it gave


class OpsWithoutFakes:
    """Ops without fakes that a model calls, with what is known of them; none if it calls none."""

    def __init__(self, model: nn.Module, inputs: Callable[[int], dict[str, Any]]) -> None:
        self.calls: dict[OpOverload, list[list[Call]]] = {}
        for length in LENGTHS:
            with torch.no_grad(), _Calls() as seen:
                model(**inputs(length))
            for op, calls in seen.found.items():
                self.calls.setdefault(op, []).append(calls)

    def __bool__(self) -> bool:
        return bool(self.calls)

    @contextmanager
    def with_fakes(self) -> Iterator[None]:
        """Inside, torch knows the shapes of what these ops give.

        Raises:
            NotTraced: they are not sizes of what an op is given, it gives something else than tensors, or views of what it is given.
        """
        with ExitStack() as undo:
            for op, runs in self.calls.items():
                undo.enter_context(_with_fake(op._schema.name, _fake(op, runs)))
                register_split_op(op)
            yield


@contextmanager
def _with_fake(name: str, fake: Callable[..., Any]) -> Iterator[None]:
    made = OPDEFS.get(name)  # by torch.library.custom_op, whose own fake asks for the author's
    if made is not None:
        with replaced_entries(vars(made), {"_abstract_fn": fake}):
            yield
        return
    library = torch.library.Library(name.split("::")[0], "FRAGMENT")
    try:
        torch.library.register_fake(name, fake, lib=library)
        yield
    finally:
        library._destroy()


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[OpOverload, list[Call]] = {}

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _has_fake(func):
            given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
            self.found.setdefault(func, []).append((given, result))
        return result


def _has_fake(op: OpOverload) -> bool:
    name = op._schema.name
    if name in OPDEFS:
        return OPDEFS[name]._abstract_fn is not None or can_generate_trivial_fake_impl(op)
    return any(map(op.has_kernel_for_dispatch_key, _KERNELS)) or singleton.find(name).fake_impl.kernel is not None


def _fake(op: OpOverload, runs: Sequence[Sequence[Call]]) -> Callable[..., Any]:
    """Makes results of the right shapes, as every call of both lengths had them."""
    several = isinstance(runs[0][0][1], (tuple, list))
    if any(argument.alias_info is not None and not argument.alias_info.is_write for argument in op._schema.arguments):
        raise _refused(op, "may give views of what it is given")
    calls = [call for run in runs for call in run]
    results = [tree_leaves(result) for _, result in calls]
    if len(runs) != len(LENGTHS) or len({len(each) for each in results}) > 1:
        raise _refused(op, "is not called in every call of the model, or gives now more and now fewer tensors")
    if any(not isinstance(leaf, Tensor) for each in results for leaf in each if leaf is not None):
        raise _refused(op, f"gives a {type(results[0][0]).__name__}, and not tensors alone")
    made = [_size_rule(op, index, [(given, each[index]) for (given, _), each in zip(calls, results, strict=True)])
            for index in range(len(results[0])) if results[0][index] is not None]  # fmt: skip

    def fake(*args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [make(given) for make in made]
        return tuple(outputs) if several else outputs[0] if outputs else None

    return fake


def _size_rule(op: OpOverload, index: int, calls: Sequence[tuple[list[Tensor], Tensor]]) -> Callable[[Sequence[Tensor]], Tensor]:
    """Each size of a result: a number, or a size of one of the tensors that the op is given."""
    first_given, first = calls[0]
    if any(result.dtype != first.dtype or result.dim() != first.dim() for _, result in calls):
        raise _refused(op, f"gives result {index} now in one dtype or number of dims and now in another")
    if any(not result.is_contiguous() for _, result in calls):
        raise _refused(op, f"gives result {index} with strides of its own")
    rules: list[int | tuple[int, int]] = []
    for dim in range(first.dim()):
        dims = [(i, j) for i, tensor in enumerate(first_given) for j in range(tensor.dim())]
        alike = [(i, j) for i, j in dims if all(given[i].shape[j] == result.shape[dim] for given, result in calls)]
        if len({result.shape[dim] for _, result in calls}) == 1:
            rules.append(first.shape[dim])
        elif alike:
            rules.append(alike[0])
        else:
            raise _refused(op, f"gives result {index} of shapes {', '.join(str(list(result.shape)) for _, result in calls[:4])}")

    def make(given: Sequence[Tensor]) -> Tensor:
        sizes = [rule if isinstance(rule, int) else given[rule[0]].shape[rule[1]] for rule in rules]
        return given[0].new_empty(sizes, dtype=first.dtype)

    return make


def _refused(op: OpOverload, why: str) -> NotTraced:
    return NotTraced(
        f"the custom op {op._schema.name} has no fake implementation, and its shapes cannot be read off its calls: it {why}. Say what it "
        f'gives: @torch.library.register_fake("{op._schema.name}").'
    )
