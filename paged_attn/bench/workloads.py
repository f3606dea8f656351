"""The workloads: batches of prompts, as data. Imports nothing heavy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

Prompts = list[list[int]]
GROUPS = {
    "latency": "one request",
    "throughput": "batches of equal requests",
    "mixed": "many requests of different lengths",
    "prefix": "requests that share the beginning of their prompts",
    "long": "one long prompt and one new token, the time to first token; and a few that are twice as long and go on",
}


@dataclass(frozen=True)
class Workload:
    """Requests that arrive together.

    Attributes:
        low, high: tokens of a prompt, without the shared ones; drawn evenly between them.
        shared: tokens with which all prompts begin.
        new: tokens that each request generates.
        prefixes: how many beginnings there are, which prompts have in turns.
    """

    group: str
    requests: int
    low: int
    high: int
    new: int
    shared: int = 0
    prefixes: int = 1

    @property
    def name(self) -> str:
        length = f"{self.low:,}" if self.low == self.high else f"{self.low:,}-{self.high:,}"
        beginnings = f"{self.prefixes} of {self.shared:,}" if self.prefixes > 1 else f"{self.shared:,}"
        prompt = f"{beginnings}+{length}" if self.shared else length
        return f"{self.group} {self.requests} x {prompt} + {self.new:,}"

    @property
    def is_even(self) -> bool:
        """Whether all prompts are of one length, so that a batch of them needs no padding."""
        return self.low == self.high

    @property
    def new_tokens(self) -> int:
        return self.requests * self.new

    @property
    def longest(self) -> int:
        """Tokens of the longest request at its end."""
        return self.shared + self.high + self.new

    def prompts(self, vocabulary: int, seed: int) -> Prompts:
        """Token ids, the same for the same arguments on every machine."""
        draw = random.Random(f"{seed} {self}")
        shared = [[draw.randrange(vocabulary) for _ in range(self.shared)] for _ in range(self.prefixes)]
        lengths = [draw.randint(self.low, self.high) for _ in range(self.requests)]
        return [shared[index % self.prefixes] + [draw.randrange(vocabulary) for _ in range(length)] for index, length in enumerate(lengths)]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "name": self.name}


def _scale(batches: Sequence[int], prompt: int, new: int, mixed: Workload, prefix: Workload, long: int) -> list[Workload]:
    return [
        Workload("latency", 1, prompt, prompt, new),
        *(Workload("throughput", size, prompt, prompt, new) for size in batches),
        mixed,
        prefix,
        Workload("long", 1, long, long, 1),
    ]


SCALES: dict[str, list[Workload]] = {
    "full": [
        *_scale((8, 32, 128), 512, 128, Workload("mixed", 256, 64, 1024, 128), Workload("prefix", 64, 32, 32, 64, 2048), 8192),
        Workload("prefix", 64, 32, 32, 64, 2048, prefixes=4),
        Workload("long", 8, 16_000, 16_000, 64),
    ],
    "small": _scale((4, 16), 64, 32, Workload("mixed", 32, 16, 128, 32), Workload("prefix", 16, 16, 16, 16, 256), 512),
    "smoke": _scale((3,), 12, 4, Workload("mixed", 4, 4, 20, 4), Workload("prefix", 3, 5, 5, 4, 32), 40),
}


def chosen(
    scale: str,
    groups: Sequence[str],
    *,
    requests: Sequence[int] | None = None,
    input_len: tuple[int, int] | None = None,
    output_len: int | None = None,
    shared_len: int | None = None,
) -> list[Workload]:
    """The workloads of some groups at a scale, with numbers of the caller in place of theirs; several `requests` make one of each. Raises
    ValueError: an unknown group, or none."""
    if not groups:
        raise ValueError(f"--workload names none; allowed are {', '.join(GROUPS)}")
    if unknown := sorted(set(groups) - set(GROUPS)):
        raise ValueError(f"--workload {', '.join(unknown)} is unknown; allowed are {', '.join(GROUPS)}")
    found: list[Workload] = []
    for group in groups:
        usual = [workload for workload in SCALES[scale] if workload.group == group]
        sized = usual if requests is None else [replace(usual[0], requests=count) for count in requests]
        for workload in sized:
            low, high = input_len or (workload.low, workload.high)
            shared = shared_len if shared_len is not None and group == "prefix" else workload.shared
            found.append(replace(workload, low=low, high=high, new=output_len or workload.new, shared=shared))
    return list(dict.fromkeys(found))
