"""Decides numerically which calls of a recurrent layer are correct: whole prompts, single tokens, chunks, several requests at once.

Some models' own forward ignores the state when it is given several tokens, and is right only token by token. Such mistakes are of the
size of the values. The chunk-wise and the step-wise formula of one layer differ by up to a thousandth in float32, where decays are strong;
and by a hundredth where they are two: Nemotron-H's chunks keep time steps above a least one, and its single steps do not. In 16 bits
rounding may do more than that, and would hide such mistakes; all of it is then tried in float32.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paged_attn.attn_ops.model_code import model_may_fail
from paged_attn.recurrent.in_float32 import in_float32, widened
from paged_attn.recurrent.layer import RecurrentLayer
from paged_attn.recurrent.watching.call_parts import Undefined
from paged_attn.tolerances import MULTIPLE, rounding, row_errors, worst

logger = logging.getLogger("paged_attn")
Result = tuple[Tensor, list[Tensor]]
LIMIT = 1e-2
LIMIT_16_BIT = FORMULAS_APART = 4e-2
_AGES = (1, 4, 7)  # cached tokens of three requests that take their next step together
_CACHE_SLOTS = (1, 3, 65, 300, 2305)  # tried as those of the first request of a batch


def verified(layer: RecurrentLayer) -> RecurrentLayer:
    """The layer with `chunks` and `batches` set to what its inputs [1, n, ...] in `arguments` show.

    Raises:
        Undefined: its results token by token and for all tokens at once differ.
    """
    inputs = layer.given
    count = inputs[0].shape[1]
    with torch.no_grad():
        whole = layer.run(inputs, None)
        steps, along = stepwise(layer, inputs)
        if not (error := difference(whole, steps)) <= FORMULAS_APART:
            refuse_infinite(layer, (whole, steps))
            twin = _twin_in_float32(layer)
            if twin is None:
                raise undefined(layer, count, error)
            return dataclasses.replace(layer, chunks=twin.chunks, batches=twin.batches, mapped=twin.mapped, own_error=error)
        chunks = _takes_chunks(layer, inputs, whole, error)
    return _batching(dataclasses.replace(layer, chunks=chunks, own_error=error), inputs, along)


def verified_as(known: RecurrentLayer, layer: RecurrentLayer) -> RecurrentLayer | None:
    """The layer with what was verified of `known`, a layer of its kind; None if its own numbers disagree: they show whether it goes on from
    a state, with several tokens if `known` takes chunks, and with one."""
    inputs, count = layer.given, layer.given[0].shape[1]
    with model_may_fail(), torch.no_grad():
        whole = layer.run(inputs, None)
        error = difference(whole, in_parts(layer, inputs, [count // 2, count - 1] if known.chunks else [count - 1]))
        if error <= min(FORMULAS_APART, allowed_error(whole, known.own_error)):
            own_error = max(error, known.own_error)
            return dataclasses.replace(layer, chunks=known.chunks, batches=known.batches, mapped=known.mapped, own_error=own_error)
    return None


def _twin_in_float32(layer: RecurrentLayer) -> RecurrentLayer | None:
    """A 16-bit layer's verified twin; None if there is none, it does not run, or its two formulas differ, too."""
    twin = in_float32(layer)
    if twin is None:
        return None
    with model_may_fail() as failures:
        try:
            return verified(twin)
        except Undefined as reason:
            failures.append(reason)
    logger.info("%s is not the same in float32: %s", layer.spec.module, failures[0])
    return None


def _takes_chunks(layer: RecurrentLayer, inputs: Sequence[Tensor], whole: Result, own_error: float) -> bool:
    """Whether several tokens may continue a state. A difference between the layer's two formulas, rounding or more, is no mistake."""
    with model_may_fail() as failures:
        chunked = in_parts(layer, inputs, [1, 4, inputs[0].shape[1] - 1])
    if failures:
        logger.debug("%s continues its state with single tokens only: %s", layer.spec.module, failures[0])
        return False
    return difference(whole, chunked) <= allowed_error(whole, own_error)


def undefined(layer: RecurrentLayer, count: int, error: float) -> Undefined:
    """The error of a layer whose results token by token and for `count` tokens at once are so far apart."""
    return Undefined(
        f"{layer.spec.module} keeps recurrent state, but its own forward gives another result token by token than for {count} tokens at "
        f"once (off by {error:.2g} of its size), so that what it would generate is not defined"
    )


def refuse_infinite(layer: RecurrentLayer, results: Sequence[Result]) -> None:
    """Raises Undefined for a layer whose own forward leaves the range of its numbers: no two of its forms can be compared then."""
    for output, states in results:
        if not all(bool(each.isfinite().all()) for each in (output, *states)):
            dtype = str(output.dtype).removeprefix("torch.")
            raise Undefined(
                f"{layer.spec.module} itself gives numbers that are infinite or NaN in {dtype}, whose largest is "
                f"{torch.finfo(output.dtype).max:.3g}; look at its weights" + ", or load the model in bfloat16" * (dtype == "float16")
            )


def error_in_float32(layer: RecurrentLayer, inputs: Sequence[Tensor]) -> float | None:
    """How far a 16-bit layer's forward token by token is from its forward for all tokens at once, in float32, where what rounding does is
    left out; None if it cannot run there."""
    twin = in_float32(layer)
    if twin is None:
        return None
    wide = [widened(value) for value in inputs]
    with model_may_fail() as failures:
        return difference(twin.run(wide, None), stepwise(twin, wide)[0])
    logger.info("%s does not run in float32: %s", layer.spec.module, failures[0])
    return None


def allowed_error(result: Result, own_error: float) -> float:
    """The allowed error of another form of a layer with this result, whose two formulas differ by `own_error`."""
    return MULTIPLE * max(own_error, rounding(*(tensor.dtype for tensor in (result[0], *result[1]))))


def _batching(layer: RecurrentLayer, inputs: Sequence[Tensor], along: list[Result]) -> RecurrentLayer:
    """The layer with `batches` and `mapped`: whether requests of different lengths can step together, in the module itself or mapped."""
    rows, states, expected = ages(inputs, along, _AGES)
    for mapped in (False, True):
        form = dataclasses.replace(layer, batches=True, mapped=mapped)
        tried = [rows] if mapped else [rows, *_at_other_slots(layer, rows)]
        with model_may_fail() as failures, torch.no_grad():
            got = [form.step(each, [state.clone() for state in states]) for each in tried]
        if failures:
            logger.debug("%s steps no batch (%s): %s", layer.spec.module, "mapped" if mapped else "as it is", failures[0])
        elif all(difference(expected, each) <= allowed_error(expected, layer.own_error) for each in got):
            return form
    return dataclasses.replace(layer, batches=False)


def _at_other_slots(layer: RecurrentLayer, rows: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The rows with other numbers in lines of integers: a batch is given the first request's line, which must not matter to the others."""
    lines = [operand.form == "line" and not value.is_floating_point() for operand, value in zip(layer.operands, rows, strict=True)]
    for place in _CACHE_SLOTS if any(lines) else ():
        yield [torch.full_like(value, place) if line else value for line, value in zip(lines, rows, strict=True)]


def stepwise(layer: RecurrentLayer, inputs: Sequence[Tensor]) -> tuple[Result, list[Result]]:
    """(all outputs and the last states, the result of each step)."""
    along: list[Result] = []
    for token in range(inputs[0].shape[1]):
        before = [state.clone() for state in along[-1][1]] if along else None
        output, states = layer.run([value[:, token : token + 1] for value in inputs], before)
        along.append((output.clone(), [state.clone() for state in states]))
    return (torch.cat([output for output, _ in along], 1), along[-1][1]), along


def in_parts(layer: RecurrentLayer, inputs: Sequence[Tensor], ends: Sequence[int], states: Sequence[Tensor] | None = None) -> Result:
    """All outputs and the last states, in calls that end at these tokens and at the last one; `states` are not changed."""
    outputs, start = [], 0
    for end in [*ends, inputs[0].shape[1]]:
        states = None if states is None else [state.clone() for state in states]
        output, states = layer.run([value[:, start:end] for value in inputs], states)
        outputs.append(output)
        start = end
    assert states is not None
    return torch.cat(outputs, 1), list(states)


def ages(inputs: Sequence[Tensor], along: list[Result], steps: Sequence[int]) -> tuple[list[Tensor], list[Tensor], Result]:
    """For requests after these numbers of `stepwise` steps: their next rows [N, 1, ...], their states, and the result of that step."""
    before, after = ([torch.cat(each) for each in zip(*(along[n][1] for n in at), strict=True)] for at in ([n - 1 for n in steps], steps))
    rows = [torch.cat([value[:, n : n + 1] for n in steps]) for value in inputs]
    return rows, before, (torch.cat([along[n][0] for n in steps]), after)


def difference(expected: Result, got: Result) -> float:
    """The largest error of a token's output or a request's state; infinite if a shape differs or a number is not finite."""
    states = list(zip(expected[1], got[1], strict=True))
    pairs = [(expected[0], got[0]), *states]
    if any(one.shape != other.shape or not bool(other.isfinite().all()) for one, other in pairs):
        return float("inf")
    tokens = row_errors(expected[0].flatten(0, 1), got[0].flatten(0, 1))
    return max(worst(errors) for errors in (tokens, *(row_errors(one, other) for one, other in states)))
