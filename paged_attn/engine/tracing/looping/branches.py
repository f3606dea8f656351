"""A block may branch on which experts were chosen, and with which weights: on nothing else, as other branches would be lost."""

from __future__ import annotations

import torch

from paged_attn.engine.tracing.looping.not_proved import NotProved
from paged_attn.engine.tracing.looping.program import ExpertsSite
from paged_attn.engine.tracing.looping.tape import Slot, Tape


def refuse_other_branches(tape: Tape, site: ExpertsSite) -> None:
    """Raises NotProved where Python looked at numbers that are made from more than the chosen experts and their weights."""
    other = _made_from_more(tape, site)
    for name, slots in tape.looked:
        if slots & other:
            raise NotProved(f"it may branch on numbers ({name}) that are not only which experts were chosen, and with which weights")


def _made_from_more(tape: Tape, site: ExpertsSite) -> set[Slot]:
    chosen = tape.values[site.ids.index].flatten()
    same = {Slot(index) for index, value in enumerate(tape.values) if _equal(value, chosen)}
    told = same | {site.weights}
    found = {Slot(index) for index, origin in enumerate(tape.origin) if not isinstance(origin, tuple)} - told
    for step in tape.steps:
        name = getattr(step.function, "__name__", "")
        if not step.given & found or name.startswith("new_") or name.endswith("_like"):
            continue  # of the latter only shapes and types are read
        found |= {slot for slot in step.results if slot is not None} - told
        found |= {slot for each in step.written for slot in tape.same_memory(each)} - told
    return found


def _equal(value: torch.Tensor, ids: torch.Tensor) -> bool:
    """Whether these are the ids, on whichever device."""
    return value.dtype == ids.dtype and value.numel() == ids.numel() and torch.equal(value.flatten().to(ids.device), ids)
