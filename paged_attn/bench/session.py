"""All systems of one call of `paged-attn bench`, one after the other."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paged_attn.bench.launch import Outcome, launch
from paged_attn.bench.shapes import SHAPES
from paged_attn.bench.systems.job import Job, ModelSource, Sampling, Task
from paged_attn.bench.systems.model_source import save_weights, text_config, write_shape
from paged_attn.bench.systems.systems import OURS, SYSTEMS
from paged_attn.bench.workloads import Workload
from paged_attn.progress import bar

WEIGHTS = "weights"


@dataclass(frozen=True)
class Session:
    """What is to be measured, and how.

    Attributes:
        model: a checkpoint's directory or hub id; None is random weights of `shape`.
        layers: the shape's first ones; None is all.
        dtype: a name of torch's; "auto" is the checkpoint's, for a shape bfloat16 on a GPU and float32 elsewhere.
        peers: after this engine, in this order.
        options: each system's own settings.
        show_output: what the systems write goes to stderr instead of files.
    """

    model: str | None
    shape: str
    layers: int | None
    dtype: str
    device: str
    save_weights: bool
    workloads: Sequence[Workload]
    peers: Sequence[str]
    seed: int
    repeat: int
    max_seconds: float
    timeout: float
    options: dict[str, dict[str, Any]]
    sampling: Sampling = field(default_factory=Sampling)
    show_output: bool = False

    @property
    def systems(self) -> list[str]:
        return [OURS, *self.peers]

    def run(self) -> list[Outcome]:
        """This engine's outcome, then the peers'. Their output is kept where one failed, and the outcome names the file. Raises ValueError:
        the model cannot be read, or has too few positions for a workload."""
        folder = Path(tempfile.mkdtemp(prefix="paged_attn_bench_"))
        outcomes: list[Outcome] = []
        try:
            source = self._source(folder)
            tasks = self._tasks(source)
            with bar(total=len(self.systems) * len(tasks), what="bench", unit="workload") as shown:
                for number, name in enumerate(self.systems):
                    shown.set_postfix_str(name)
                    outcomes.append(self._outcome(name, source, tasks, folder, shown))
                    shown.update((number + 1) * len(tasks) - shown.n)
        finally:
            if not any(outcome.is_broken for outcome in outcomes):
                shutil.rmtree(folder)
            elif (folder / WEIGHTS).exists():
                shutil.rmtree(folder / WEIGHTS)
        return outcomes

    def facts(self, machine: dict[str, Any]) -> dict[str, Any]:
        """For the record."""
        cut = "" if self.layers is None else f", {self.layers} of its {SHAPES[self.shape]['num_hidden_layers']} layers"
        name = self.model or f"{self.shape}{cut}, random weights"
        shown = ("repeat", "seed", "max_seconds", "timeout", "options", "save_weights", "sampling")
        return {
            "command": " ".join(["paged-attn", *sys.argv[1:]]),
            "machine": machine,
            "model": {"name": name, "dtype": self._dtype},
            "decoding": str(self.sampling),
            "settings": {field: value for field, value in asdict(self).items() if field in shown},
        }

    @property
    def same_tokens(self) -> frozenset[str]:
        """Systems that should choose this engine's tokens: none where they are drawn, and vLLM fills a config without weights with numbers
        of its own."""
        own = self.model is None and not self.save_weights
        if not self.sampling.is_greedy:
            return frozenset()
        return frozenset(name for name in self.systems if not (own and SYSTEMS[name].package == "vllm"))

    @property
    def _dtype(self) -> str:
        if self.dtype != "auto" or self.model is not None:
            return self.dtype
        return "bfloat16" if self.device.startswith("cuda") else "float32"

    def _source(self, folder: Path) -> ModelSource:
        if self.model is not None:
            return ModelSource(self.model, False, self.dtype, self.device)
        assert self.shape in SHAPES, self.shape
        config = write_shape(self.shape, self._dtype, folder / "config", self.layers)
        source = ModelSource(config, True, self._dtype, self.device)
        if not self.save_weights:
            return source
        print(f"bench: writing random weights to {folder} (TMPDIR chooses where), so that all systems have the same ones", file=sys.stderr)
        return save_weights(source, folder / WEIGHTS)

    def _tasks(self, source: ModelSource) -> list[Task]:
        config = text_config(source.path)
        positions = getattr(config, "max_position_embeddings", None)
        for workload in self.workloads:
            if positions is not None and workload.longest > positions:
                raise ValueError(
                    f"workload {workload.name!r} needs {workload.longest:,} positions and the model has {positions:,}; "
                    "lower --input-len, --output-len or --shared-len, or leave it out of --workload"
                )
        return [Task(workload, workload.prompts(config.vocab_size, self.seed)) for workload in self.workloads]

    def _outcome(self, name: str, source: ModelSource, tasks: list[Task], folder: Path, shown: Any) -> Outcome:
        def note(text: str) -> None:
            shown.write(f"{name}: {text}", file=sys.stderr)

        why = SYSTEMS[name].missing(self.device)
        if why is None:
            note("starting")
            job = Job(name, source, tasks, self.repeat, self.max_seconds, self.options[name], self.sampling, self.show_output)
            outcome = launch(job, folder, note, shown.update, timeout=self.timeout, show_output=self.show_output)
        else:
            outcome = Outcome(name, failed=why)
        if outcome.failed is not None:
            note(outcome.failed)
        return outcome
