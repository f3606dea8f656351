"""Decides numerically which recurrent layers run as ops on the state pool, by comparison with their own forward on ragged batches."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest, StateCheckpoint
from paged_attn.attn_ops.batch.step_buffers import MIN_ROWS, StepShape
from paged_attn.attn_ops.context import without_attention
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.state_pool import StatePool
from paged_attn.attn_ops.model_code import MODEL_ERRORS, model_code, model_may_fail
from paged_attn.attn_ops.ops.define import BodiesOnFakes
from paged_attn.attn_ops.specs.recurrent import StateSpec
from paged_attn.backends.devices import architecture_of, device_word
from paged_attn.backends.scans.base import ScanProblem
from paged_attn.backends.selection.scans import NoBackendFits, ScanSelection, scans_backend, select_scan
from paged_attn.calling.plain_modes import evaluating
from paged_attn.calling.reference_functions import forward_scopes
from paged_attn.recurrent.as_ops.functions import FUNCTIONS, layer_of_ops, ops_that_ran, replaced_functions
from paged_attn.recurrent.in_float32 import in_float32, rounds_to_16_bits
from paged_attn.recurrent.inline.make_program import with_program
from paged_attn.recurrent.layer import RecurrentLayer
from paged_attn.recurrent.program import NoOpFits
from paged_attn.recurrent.run import OnlyKernels, RecurrentRunner
from paged_attn.recurrent.same_kind import kind_of
from paged_attn.recurrent.verify import LIMIT, LIMIT_16_BIT, difference, in_parts, verified
from paged_attn.recurrent.watching.call_parts import Undefined
from paged_attn.stopwatch import part
from paged_attn.tolerances import MULTIPLE, rounding

logger = logging.getLogger("paged_attn")
# New tokens of each request in each step: prompts of several chunks, first tokens, continued states, decoding rows.
STEPS = ((66, 1, 3, 0), (1, 9, 2, 1), (1, 1, 1, 1), (2, 1, 0, 5))
SLOTS = (3, 1, 5, 2)
KEPT = {0: (StateCheckpoint(63, 4),)}  # by step: checkpoints of its first request, here one inside a chunk
PADDING, PAGE = 2, 4096


@part("prove recurrent ops")
def with_ops(layers: Sequence[RecurrentLayer], backend: str = "auto") -> tuple[RecurrentLayer, ...]:
    """The layers, with `ops` if these are proved, else with `why_no_ops`; `backend`: "auto", or a name from
    `paged_attn.backends.selection.scans`.

    Raises:
        ValueError: an unknown backend.
        UnsupportedError: the backend cannot compute one of these ops, gives wrong results, or supports none of them.
    """
    if backend != "auto":
        scans_backend(backend)
    known: dict[Hashable, RecurrentLayer] = {}
    found = []
    for layer in layers:
        kind = kind_of(layer)
        if kind not in known:
            try:
                known[kind] = _proved(layer, backend)
            except NoOpFits as reason:
                known[kind] = dataclasses.replace(layer, why_no_ops=str(reason))
            logger.info("%s (%s) runs %s", layer.spec.module, type(layer.module).__name__, known[kind].describe())
        found.append(_like(known[kind], layer))
    if layers and backend != "auto" and not any(each.name == backend for layer in found for each in layer.scans):
        have = ", ".join(sorted({op for layer in found for op in layer.ops})) or "none that is an op"
        raise UnsupportedError(
            f"scans_backend={backend!r} computes {', '.join(sorted(scans_backend(backend).ops))}; this model's layers with recurrent state "
            f"have {have}. Leave scans_backend out."
        )
    return tuple(found)


def _like(known: RecurrentLayer, layer: RecurrentLayer) -> RecurrentLayer:
    """A layer with what is known of one of its kind; its program is its own, for its number may be part of what it computes."""
    if known.program is not None:
        with evaluating(layer.module):
            try:
                layer = with_program(layer)
            except NoOpFits as reason:
                return dataclasses.replace(layer, why_no_ops=str(reason))
    return dataclasses.replace(layer, ops=known.ops, why_no_ops=known.why_no_ops, scans=known.scans)


def _proved(layer: RecurrentLayer, backend: str) -> RecurrentLayer:
    """The layer with its ops, and the kernels that compute them.

    Raises:
        NoOpFits: the layer cannot run by ops.
        UnsupportedError: as in `with_ops`.
    """
    scopes = scopes_of([layer.module])
    if not scopes:
        return _proved_with(layer, backend, scopes)
    try:
        return _proved_with(layer, backend, scopes)
    except NoOpFits as reason:
        try:
            return _proved_with(layer, backend, [])
        except NoOpFits as other:
            logger.debug("%s: %s", layer.spec.module, other)
            raise reason from None


def _proved_with(layer: RecurrentLayer, backend: str, scopes: Sequence[dict[str, Any]]) -> RecurrentLayer:
    """By the functions in these globals or, without any, by the layer's program."""
    if not all(state.dtype.is_floating_point for state in layer.spec.states):
        raise NoOpFits("a state of it is not a floating-point tensor")
    with torch.no_grad(), evaluating(layer.module):
        served, states = _by_functions(layer, scopes) if scopes else _by_program(layer)
        _refuse_in_float32(layer, scopes)
        chosen = dataclasses.replace(served, scans=_selected(layer, served.ops, states, backend))
        if chosen.kernels:
            if _compiles_ahead(chosen):
                compile_ahead(chosen, scopes)
            error, allowed = _compared(layer, chosen, scopes)
            if error <= allowed:
                return chosen
        with model_code(_needs_cache if scopes else _program_fails):  # without kernels: if this is off too, the ops do not fit
            own_error, own_allowed = _compared(layer, served, scopes)
    if not own_error <= own_allowed:
        raise NoOpFits(f"its ops are off by {own_error:.2g} of its size, allowed is {own_allowed:.2g}")
    if not chosen.kernels:
        return chosen
    why = f"{', '.join(each.describe() for each in chosen.scans)} is off by {error:.2g} of its size, allowed is {allowed:.2g}"
    if any(each.name == backend for each in chosen.scans):
        raise UnsupportedError(f"{layer.spec.module} with scans_backend={backend!r}: {why}. Try scans_backend='auto'.")
    raise NoOpFits(why)


def _refuse_in_float32(layer: RecurrentLayer, scopes: Sequence[dict[str, Any]]) -> None:
    """Compares the ops of a 16-bit layer with its forward in float32, too, if it runs there. Raises NoOpFits if they differ."""
    twin = in_float32(layer)
    if twin is None:
        return
    with model_may_fail() as failures:
        try:
            twin = verified(twin)
            served, _ = _by_functions(twin, scopes) if scopes else _by_program(twin)
            error, allowed = _compared(twin, served, scopes)
        except (Undefined, NoOpFits) as reason:
            failures.append(reason)
    if failures:
        logger.info("%s is not compared with its ops in float32: %s", layer.spec.module, failures[0])
    elif not error <= allowed and not (error <= LIMIT and rounds_to_16_bits(twin)):
        raise NoOpFits(f"in float32 its ops are off by {error:.2g} of its size, allowed is {allowed:.2g}")


def _by_functions(layer: RecurrentLayer, scopes: Sequence[dict[str, Any]]) -> tuple[RecurrentLayer, list[StateSpec]]:
    """The layer with the ops in the place of its functions, and the state of each."""
    with model_code(_needs_cache):
        ops, states = _ops_and_states(layer, scopes)
    if len(ops) < len(layer.spec.states):
        raise NoOpFits("ops are known for only some of its states")
    return dataclasses.replace(layer, ops=ops), states


def _by_program(layer: RecurrentLayer) -> tuple[RecurrentLayer, Sequence[StateSpec]]:
    """The layer with the ops in the place of what it computes itself, and the state of each."""
    try:
        served = with_program(layer)
    except NoOpFits as reason:
        raise NoOpFits(f"it calls no function that an op is known for, and {reason}") from reason
    assert served.program is not None
    return dataclasses.replace(served, ops=served.program.ops), served.spec.states


def _needs_cache(why: str) -> NoOpFits:
    return NoOpFits(f"it cannot be called without a cache: {why}")


def _program_fails(why: str) -> NoOpFits:
    return NoOpFits(f"its program fails: {why}")


def _selected(layer: RecurrentLayer, ops: Sequence[str], states: Sequence[StateSpec], backend: str) -> tuple[ScanSelection, ...]:
    hidden = layer.given[0]
    where = (hidden.dtype, device_word(hidden.device), architecture_of(hidden.device))
    problems = [ScanProblem(op, state.shape, *where) for op, state in zip(ops, states, strict=True)]
    try:
        return tuple([select_scan(backend, problem) for problem in problems])
    except NoBackendFits as reason:
        raise NoOpFits(str(reason)) from reason


def scopes_of(modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """The globals in which the forwards of these modules and their submodules find functions that have an op."""
    return [scope for scope in forward_scopes(modules) if FUNCTIONS.keys() & scope.keys()]


def _ops_and_states(layer: RecurrentLayer, scopes: Sequence[dict[str, Any]]) -> tuple[tuple[str, ...], list[StateSpec]]:
    """The ops that the layer's forward calls in a step of two tokens, and the state of each."""
    pool = StatePool([layer.spec], 2, _device(layer))
    batch = Batch.build([BatchRequest([0] * 2, [1], state_slot=1)], PAGE, _device(layer), StepShape(2 + PADDING, MIN_ROWS))
    _by_ops(layer, scopes, pool, batch, _rows(layer, 2, 0))
    ran = ops_that_ran()
    return tuple(ran.values()), [layer.spec.states[state] for state in ran]


def _compared(layer: RecurrentLayer, served: RecurrentLayer, scopes: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """The error of the ops, and the allowed error."""
    error, allowed = apart(layer, served, scopes), _limit(layer)
    if layer.chunks and allowed < error < LIMIT:
        allowed = min(LIMIT, max(allowed, MULTIPLE * _own_noise(layer)))
    return error, allowed


def apart(layer: RecurrentLayer, served: RecurrentLayer, scopes: Sequence[dict[str, Any]]) -> float:
    """The largest error of an output row or a request's state, in ragged steps in a pool otherwise full of NaN; infinite if it has NaN.

    served: the layer as its ops run it; its states may have another dtype.
    """
    layer = layer.as_written
    pools = [StatePool([each.spec], max(SLOTS) + 1, _device(layer)) for each in (layer, served)]
    for pool in pools:
        pool.fill(float("nan"))
    own = RecurrentRunner([layer], pools[0])
    error = 0.0
    for number, batch in enumerate(_batches(_device(layer))):
        total = batch.num_tokens
        inputs = _rows(layer, total, number)
        output = torch.zeros(1, total + PADDING, *layer.output_shape, dtype=layer.output_dtype, device=_device(layer))
        own.forward(own.plan(batch), 0, inputs, output)
        result = _by_ops(served, scopes, pools[1], batch, inputs)
        slots = [*batch.state_slots_host, *(kept.slot for kept in KEPT.get(number, ()))]
        states = [[state[slots].float() for state in pool.states(0)] for pool in pools]
        if served.program is not None:
            states[0] = [layout.of(states[0]) for layout in served.program.states]
        results = [(rows[:, :total].flatten(2), after) for rows, after in zip((output, result), states, strict=True)]
        error = max(error, difference(*results))
    return error


def _batches(device: torch.device) -> Iterator[Batch]:
    """The batches of `STEPS`."""
    seen = [0] * len(SLOTS)
    for number, counts in enumerate(STEPS):
        requests = [
            BatchRequest([0] * count, [1], before, state_slot=slot)
            for count, before, slot in zip(counts, seen, SLOTS, strict=True)
            if count
        ]
        requests[0] = requests[0]._replace(checkpoints=KEPT.get(number, ()))
        total = sum(counts)
        yield Batch.build(requests, PAGE, device, StepShape(total + PADDING, max(total, MIN_ROWS)))
        seen = [before + new for before, new in zip(seen, counts, strict=True)]


def _compiles_ahead(layer: RecurrentLayer) -> bool:
    return _device(layer).type == "cuda" and all(scans_backend(each.name).compiles_ahead for each in layer.scans)


def compile_ahead(layer: RecurrentLayer, scopes: Sequence[dict[str, Any]]) -> None:
    """Compiles the kernels that `apart` will launch, in parallel in other processes."""
    from paged_attn.backends.compiling.compile_ahead import compiling_ahead, on_fakes

    device = _device(layer)
    steps = [(batch, _rows(layer, batch.num_tokens, number)) for number, batch in enumerate(_batches(device))]
    with compiling_ahead(device), BodiesOnFakes():  # type: ignore[no-untyped-call]
        pool = StatePool([layer.spec], max(SLOTS) + 1, device)
        try:
            for batch, inputs in steps:
                _by_ops(layer, scopes, pool, on_fakes(batch, device), [*map(torch.empty_like, inputs)], OnlyKernels)
        except MODEL_ERRORS as error:  # raised by the model's own code, which may read values
            logger.info("%s does not run on fake tensors, so its kernels are compiled one after the other: %s", layer.spec.module, error)


def _by_ops(
    layer: RecurrentLayer, scopes: Sequence[dict[str, Any]], pool: StatePool, batch: Batch, inputs: Sequence[Tensor],
    kind: type[RecurrentRunner] = RecurrentRunner,
) -> Tensor:  # fmt: skip
    """The output of the layer's forward [1, rows, ...], with its functions replaced by ops, or of its program."""
    shapes = [state.shape for state in layer.spec.states]
    ops = kind([layer], pool)
    if layer.program is not None:
        with without_attention(batch, torch.float32, ops):
            return layer.program.run(layer.module, inputs, 0)
    with without_attention(batch, torch.float32, ops), layer_of_ops(shapes), replaced_functions(scopes):
        return layer.run_without_cache(inputs)


def _own_noise(layer: RecurrentLayer) -> float:
    """The effect of rounding on the rows of `apart` in the layer's own forward: token by token compared with all tokens of a step at once,
    and with every input off by 1 / `MULTIPLE` of a rounding."""
    states: list[Sequence[Tensor] | None] = [None] * len(SLOTS)
    noise = 0.0
    for number, counts in enumerate(STEPS):
        rows, start = _rows(layer, sum(counts), number), 0
        for request, count in enumerate(counts):
            if count:
                inputs = [value[:, start : start + count] for value in rows]
                nudged = [_nudged(value) for value in inputs]
                ways = ((inputs, ()), (inputs, range(1, count)), (nudged, ()))
                whole, *others = (in_parts(layer, values, ends, states[request]) for values, ends in ways)
                noise = max(noise, *(difference(whole, other) for other in others))
                start, states[request] = start + count, whole[1]
    return noise


def _nudged(rows: Tensor) -> Tensor:
    """The rows, alternately increased and decreased by 1 / `MULTIPLE` of a rounding."""
    if not rows.is_floating_point():
        return rows
    signs = torch.arange(rows.numel(), device=rows.device).view_as(rows) % 2 * 2 - 1
    return rows * (1 + rounding(rows.dtype) / MULTIPLE * signs.to(rows.dtype))


def _rows(layer: RecurrentLayer, count: int, seed: int) -> list[Tensor]:
    """Inputs of a layer for `count` tokens [1, count + PADDING, ...], mixed from its inputs in a real call; padding is NaN."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for given in (each[0] for each in layer.given):
        one, other = (torch.randint(0, len(given), (count + PADDING,), generator=generator).to(given.device) for _ in range(2))
        rows = given[one]
        if given.is_floating_point():
            share = torch.rand(count + PADDING, generator=generator).to(given.device, given.dtype).view(-1, *[1] * (given.dim() - 1))
            rows = rows * share - given[other] * (1 - share)
            rows[count:] = float("nan")
        made.append(rows[None])
    return made


def _limit(layer: RecurrentLayer) -> float:
    """The allowed error: rounding; in 16 bits, where the layer's own forward rounds between its steps, as much as its two forms differ."""
    dtypes = (layer.output_dtype, *(state.dtype for state in layer.spec.states))
    if any(dtype.itemsize < 4 for dtype in dtypes):
        return max(LIMIT_16_BIT, layer.own_error)
    return max(layer.own_error, MULTIPLE * rounding(*dtypes))


def _device(layer: RecurrentLayer) -> torch.device:
    return layer.given[0].device
