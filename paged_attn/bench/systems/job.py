"""The job of one system and its log, as JSON between two processes. Imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paged_attn.bench.workloads import Prompts, Workload


@dataclass(frozen=True)
class Sampling:
    """Settings of every request, by the names that all systems share; temperature 0 is greedy, top_p 1 and top_k 0 are off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def given(self) -> dict[str, Any]:
        """What is not off."""
        return {name: value for name, value in vars(self).items() if value != getattr(Sampling, name)}

    @property
    def for_transformers(self) -> dict[str, Any]:
        """Arguments of `generate`, which takes from a model's own settings what it is not told."""
        return {"do_sample": False} if self.is_greedy else {"do_sample": True, **vars(self)}

    def __str__(self) -> str:
        return "greedy" if self.is_greedy else ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in self.given.items())


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint (`path` with weights), or a config alone (`path` without), for which weights are drawn from seed 0.

    Attributes:
        path: a directory or a hub id.
        dtype: a name of torch's, or "auto" for the checkpoint's own.
        device: cpu, cuda or cuda:N.
    """

    path: str
    random_weights: bool
    dtype: str
    device: str


@dataclass(frozen=True)
class Task:
    workload: Workload
    prompts: Prompts


@dataclass(frozen=True)
class Job:
    """Everything that a worker needs to know.

    Attributes:
        repeat: how often each workload is timed.
        max_seconds: no further repetition of a workload that would take more than this in all; a first one there always is.
        options: the system's own settings.
        progress: draw bars even if stderr is not a terminal.
    """

    system: str
    model: ModelSource
    tasks: Sequence[Task]
    repeat: int
    max_seconds: float
    options: dict[str, Any] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    progress: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest request at its end."""
        return max(task.workload.longest for task in self.tasks)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Job:
        fields = json.loads(path.read_text())
        tasks = [Task(Workload(**task["workload"]), task["prompts"]) for task in fields.pop("tasks")]
        return cls(model=ModelSource(**fields.pop("model")), tasks=tasks, sampling=Sampling(**fields.pop("sampling")), **fields)


class Log:
    """Lines of JSON, one an event, that the worker appends and its parent reads while they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def write(self, event: str, **facts: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"event": event, **facts}) + "\n")

    def new(self) -> list[dict[str, Any]]:
        """Events that are complete and were not returned yet."""
        if not self.path.exists():
            return []
        with self.path.open() as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._read += len(whole.encode())
        return [json.loads(line) for line in whole.splitlines()]
