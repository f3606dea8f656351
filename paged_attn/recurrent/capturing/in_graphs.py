"""Which layers that run by their own forward a captured decode step may hold, seen on numbers and on what they launch.

A replay launches what the recording did. So a layer is held if it launches the same for requests of other lengths: a length or a position
that it knows as a number of Python would be a constant of the graph. What only a GPU shows, as a copy that waits, ends the capture itself.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paged_attn.attn_ops.kv.state_pool import StatePool
from paged_attn.attn_ops.model_code import MODEL_ERRORS
from paged_attn.attn_ops.scans.state_rows import RecurrentPlan, StateRows
from paged_attn.calling.evaluating import evaluating
from paged_attn.recurrent.as_ops.by_ops import kind_of
from paged_attn.recurrent.capturing.launches import Launches, NotCapturable, first_difference
from paged_attn.recurrent.layer import RecurrentLayer
from paged_attn.recurrent.run import RecurrentRunner
from paged_attn.recurrent.verify import Result, ages, allowed_error, difference, stepwise

logger = logging.getLogger("paged_attn")
AGES = ((1, 4, 7), (8, 2, 5))  # tokens that the requests of a step have behind them, in two steps of a graph
SLOTS = (4, 0, 1, 2)  # of a step's rows; 0 is nobody's
REAL = tuple(row for row, slot in enumerate(SLOTS) if slot)


def with_graphs(layers: Sequence[RecurrentLayer]) -> tuple[RecurrentLayer, ...]:
    """The layers, those without ops with `why_not_in_graphs`; layers of one kind are tried once."""
    known: dict[tuple[Any, ...], str] = {}
    found = []
    for layer in layers:
        if not layer.ops:
            kind = (layer.batches, layer.mapped, kind_of(layer))
            if kind not in known:
                with torch.no_grad(), evaluating(layer.module):
                    why = known[kind] = _why_not(layer)
                logger.info("full graphs %s %s%s", "leave out" if why else "hold", layer.spec.module, why and f": {why}")
            layer = dataclasses.replace(layer, why_not_in_graphs=known[kind])
        found.append(layer)
    return tuple(found)


def _why_not(layer: RecurrentLayer) -> str:
    if not layer.batches:
        return "it decodes requests one by one"
    inputs = layer.given
    _, along = stepwise(layer, inputs)
    told = []
    for steps in AGES:
        rows, states, expected = ages(inputs, along, steps)
        try:
            launches, got = _step(layer, rows, states)
        except NotCapturable as reason:
            return str(reason)
        except torch.OutOfMemoryError:
            raise
        except MODEL_ERRORS as failure:  # of the model's own code
            return f"beside padding it raises {type(failure).__name__}: {failure}"
        told.append(launches)
        error, allowed = difference(expected, got), allowed_error(expected, layer.own_error)
        if not error <= allowed:
            return f"beside padding it is off by {error:.2g} of its size, allowed is {allowed:.2g}"
    apart = first_difference(*told)
    return f"what it launches depends on more than its tensors: {apart}" if apart else ""


def _step(layer: RecurrentLayer, rows: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[list[str], Result]:
    """What a decode step [N, 1, ...] launches beside rows that are nobody's and states of NaN, and the requests' outputs and states."""
    device = rows[0].device
    slots, real = (torch.tensor(values, device=device) for values in (SLOTS, REAL))
    pool = StatePool([layer.spec], max(SLOTS) + 2, device)
    for kept, state in zip(pool.states(0), states, strict=True):
        if kept.is_floating_point():
            kept.fill_(float("nan"))
        kept[slots[real]] = state
    given = [value.new_full((1, len(SLOTS), *value.shape[2:]), float("nan") if value.is_floating_point() else 0) for value in rows]
    for padded, value in zip(given, rows, strict=True):
        padded[0, real] = value[:, 0]
    output = torch.full((1, len(SLOTS), *layer.output_shape), float("nan"), dtype=layer.output_dtype, device=device)
    runner, plan = RecurrentRunner([layer], pool), RecurrentPlan(len(SLOTS), (StateRows(None, slots, None),))
    launches = Launches(
        [*given, *pool.states(0), slots, output], [*layer.module.parameters(), *layer.module.buffers(), *layer.template.tensors]
    )
    with launches:
        runner.forward(plan, 0, given, output)
    return launches.told, (output[0, real][:, None], [state[slots[real]] for state in pool.states(0)])
