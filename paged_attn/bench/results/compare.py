"""Compares this engine's results with each peer's: ratios, equal tokens, and the record of everything."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paged_attn.bench.launch import Outcome
from paged_attn.bench.systems.systems import OURS, Tokens
from paged_attn.bench.workloads import Workload

Record = dict[str, Any]


def agreement(ours: Tokens, theirs: Tokens) -> dict[str, float]:
    """Shares of the new tokens before the first difference in their request, and of the requests without one."""
    same = [equal_start(a, b) for a, b in zip(ours, theirs, strict=True)]
    total = sum(map(len, ours))
    whole = sum(a == b for a, b in zip(ours, theirs, strict=True))
    return {"tokens": sum(same) / total, "requests": whole / len(ours)}


def equal_start(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens are the same before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def record(outcomes: Sequence[Outcome], workloads: Sequence[Workload], same_tokens: frozenset[str], settings: Record) -> Record:
    """Everything, ready for JSON. `same_tokens`: systems that should choose ours, so that they can be compared."""
    by_name = {outcome.system: outcome for outcome in outcomes}
    ours = by_name[OURS].timed
    ratios: Record = {}
    equal: Record = {}
    for peer in outcomes[1:]:
        both = [workload.name for workload in workloads if workload.name in ours and workload.name in peer.timed]
        ratios[peer.system] = {name: ours[name]["tokens_per_second"] / peer.timed[name]["tokens_per_second"] for name in both}
        if peer.system in same_tokens:
            equal[peer.system] = {name: agreement(ours[name]["tokens"], peer.timed[name]["tokens"]) for name in both}
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **settings,
        "workloads": [workload.as_dict() for workload in workloads],
        "systems": {outcome.system: _system(outcome) for outcome in outcomes},
        "ratios": ratios,
        "equal_tokens": equal,
    }


def _system(outcome: Outcome) -> Record:
    fields = asdict(outcome)
    for timed in fields["timed"].values():
        del timed["tokens"]
    return fields
