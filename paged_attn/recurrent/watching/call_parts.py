"""Finds which arguments and results of a module with state are per token, by calls on two lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.specs.recurrent import RecurrentSpec, StateSpec
from paged_attn.recurrent.cache_state import CacheTemplate
from paged_attn.recurrent.layer import Operand, Output, RecurrentLayer
from paged_attn.recurrent.watching.watch import Call, positional_names

SHORT, LONG = 3, 11  # tokens of the two calls


def layer_of(
    call: Call, earlier: Call, states: Sequence[StateSpec], template: CacheTemplate, unused: frozenset[str] = frozenset(),
    state_at: int | None = None,
) -> RecurrentLayer:  # fmt: skip
    """The unverified layer of a module, from its calls on LONG and (`earlier`) on SHORT tokens.

    Raises:
        UnsupportedError: it cannot be run by itself.
    """
    operands, (outputs, length, dtype) = _operands(call, earlier), _outputs(call)
    return RecurrentLayer(
        spec=RecurrentSpec(call.name, tuple(states)), module=call.module, positional=positional_names(call.module),
        arguments=call.arguments, operands=operands, cache_name=call.cache_name, outputs=outputs, output_length=length, output_dtype=dtype,
        template=template, unused=unused, state_at=state_at,
    )  # fmt: skip


def _operands(call: Call, earlier: Call) -> tuple[Operand, ...]:
    """The module's input tensors, the hidden states (the first floating-point one with a row per token) first."""
    found: list[Operand] = []
    for where, long, short in tensors_given(call, earlier):
        if (operand := operand_of(where, long, short)) is None:
            raise refused(
                call.name,
                f"it is given {where.name} of shape {list(long.shape)} for {LONG} tokens and {list(short.shape)} for {SHORT}, and needs "
                "it; known are one row per token, and what is the same for all tokens",
            )
        found.append(operand)
    rows = [operand for operand in found if operand.form == "rows"]
    floating = [o for o in rows if o.of(call.arguments).is_floating_point()]
    if not rows:
        raise refused(call.name, "it is given no tensor per token")
    first = floating[0] if floating else rows[0]
    return (first, *(operand for operand in found if operand != first))


def tensors_given(call: Call, earlier: Call) -> Iterator[tuple[Operand, Tensor, Tensor]]:
    """Where a call has tensors, and those of the call on LONG and of the `earlier` one on SHORT tokens."""
    for name, value in call.arguments.items():
        parts = enumerate(value) if isinstance(value, (tuple, list)) else [(None, value)]
        for index, part in parts:
            if isinstance(part, Tensor):
                where = Operand(name, index)
                yield where, part, where.of(earlier.arguments)


def operand_of(where: Operand, long: Tensor, short: Tensor) -> Operand | None:
    """The operand in the form that its shapes in both calls show; None for an unknown one, such as a mask of tokens by tokens."""
    if [tuple(each.shape[:2]) for each in (long, short)] == [(1, LONG), (1, SHORT)]:
        return where
    if [tuple(each.shape[:1]) for each in (long, short)] == [(LONG,), (SHORT,)] and long.shape[1:] == short.shape[1:]:
        return replace(where, form="line")
    return replace(where, form="whole") if long.shape == short.shape else None


def _outputs(call: Call) -> tuple[tuple[Output, ...], int, torch.dtype]:
    """The module's outputs per token [1, n, ...], the length of its result, and the dtype."""
    several = isinstance(call.output, (tuple, list))
    parts = call.output if several else [call.output]
    found = {at: part for at, part in enumerate(parts) if isinstance(part, Tensor) and tuple(part.shape[:2]) == (1, LONG)}
    dtypes = {part.dtype for part in found.values()}
    if not found:
        raise refused(call.name, f"it returns a {type(call.output).__name__} without a tensor [1, tokens, ...]")
    if len(dtypes) > 1:
        raise refused(call.name, f"it returns tensors of {' and '.join(sorted(map(str, dtypes)))}; known is one dtype")
    outputs = tuple(Output(at if several else None, tuple(part.shape[2:])) for at, part in found.items())
    return outputs, len(parts), dtypes.pop()


class NotDriven(UnsupportedError):
    """Modules with recurrent state cannot be run by themselves, one request at a time.

    Attributes:
        modules: their paths.
        why: what is in the way, for the first of them.
    """

    def __init__(self, modules: Sequence[str], why: str) -> None:
        self.modules, self.why = tuple(modules), why
        super().__init__(
            f"{modules[0]} keeps recurrent state, and paged_attn cannot run it one request at a time: {why}. Nothing was generated."
        )


class Undefined(UnsupportedError):
    """What a layer computes from its state is another thing than what it computes without: no tokens are the model's."""


def refused(where: str, why: str) -> NotDriven:
    """The error of a layer that cannot be run by itself."""
    return NotDriven([where], why)
