"""The systems that can be measured, and the job of each. Imports nothing heavy."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from paged_attn.bench.systems.job import Job
from paged_attn.bench.workloads import Prompts, Workload

OURS = "paged_attn"
Tokens = list[list[int]]
Stamps = list[list[float]]


Run = Callable[[], tuple[Tokens, Stamps | None]]


class System:
    """A loaded model that generates greedily, exactly `new` tokens for each prompt, end tokens ignored. `stamps_are_free`: whether stamps
    cost nothing, so that timed runs may have them too."""

    stamps_are_free = False

    def ready(self, prompts: Prompts, new: int, *, stamped: bool) -> AbstractContextManager[Run]:
        """Yields what is to be timed: it submits all prompts at once and returns their tokens. The prefix cache is emptied before.

        Args:
            stamped: also return the `time.perf_counter` at which each token came to the caller.

        Raises:
            RuntimeError: the prefix cache could not be emptied, or a request failed.
        """
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Versions and choices that a reader of the figures needs."""
        raise NotImplementedError

    def close(self) -> None:
        """What is to be done before its process ends."""


@dataclass(frozen=True)
class Entry:
    """Where a system's code is, what it needs, and which workloads it can run."""

    module: str
    package: str
    install: str
    about: str
    even_only: bool = False
    device: str | None = None

    def missing(self, device: str) -> str | None:
        """Why it cannot run here and what to do, or None."""
        if importlib.util.find_spec(self.package) is None:
            return f"not installed; {self.install}"
        if self.device is not None and not device.startswith(self.device):
            return f"is measured on {self.device} only, and this is a run on {device}; leave it out, or give --device {self.device}"
        return None

    def refuses(self, workload: Workload) -> str | None:
        if self.even_only and not workload.is_even:
            return "prompts of different lengths would be padded; not a workload of this system"
        return None

    def start(self, job: Job) -> System:
        """Load the model; afterwards it is ready to be timed."""
        system: System = importlib.import_module(f"paged_attn.bench.systems.{self.module}").start(job)
        return system


_TRANSFORMERS = "pip install 'transformers>=5.17'"
_VLLM = "pip install vllm (in an environment of its own, if it wants another torch; then run `paged-attn bench` there)"
SYSTEMS = {
    OURS: Entry("ours", "torch", "pip install torch", "this engine"),
    "transformers": Entry("hf_batch", "transformers", _TRANSFORMERS, "continuous batching of transformers (generate_batch) with SDPA"),
    "transformers-generate": Entry(
        "hf_generate", "transformers", _TRANSFORMERS, "plain model.generate on one batch; equal prompt lengths only", even_only=True
    ),
    "vllm": Entry("vllm_engine", "vllm", _VLLM, "vLLM with its own model class", device="cuda"),
    "vllm-transformers": Entry("vllm_engine", "vllm", _VLLM, "vLLM with its Transformers backend", device="cuda"),
}
PEERS = tuple(name for name in SYSTEMS if name != OURS)


def peers(text: str) -> list[str]:
    """Names from `--compare a,b`; "all" stands for every one. Raises ValueError: an unknown name."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if names == ["all"]:
        return list(PEERS)
    if unknown := [name for name in names if name not in PEERS]:
        raise ValueError(f"--compare {', '.join(unknown)} is unknown; allowed are {', '.join(PEERS)}, or all")
    return names


def draws_weights(name: str, device: str) -> bool:
    """Whether this system runs on the device and fills a config without weights with random numbers of its own."""
    return SYSTEMS[name].package == "vllm" and SYSTEMS[name].missing(device) is None


def check_counts(tokens: Tokens, new: int, who: str) -> None:
    """Raises RuntimeError where a request has not the number of tokens that was asked for: such a time compares with nothing."""
    wrong = sorted({len(row) for row in tokens} - {new})
    if wrong:
        raise RuntimeError(f"{who} gave {wrong} new tokens where {new} were asked for; it stopped early or not at all")


def versions_of(*packages: str) -> dict[str, str]:
    return {name: importlib.import_module(name).__version__ for name in packages}


def rows_of(outputs: Sequence[Sequence[int]]) -> Tokens:
    return [list(map(int, row)) for row in outputs]
