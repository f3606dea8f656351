"""What one round of the soak does: all of it follows from the seed and the round's number."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

KINDS = ("engine", "threads", "server")
ORDER = ("engine", "threads", "engine", "server", "engine", "threads")
ABRUPT = (4, 7, 9)  # of twelve rounds: one of each kind
TIGHT = 3  # of twenty-four rounds: the first with a server
ATTENTION, RECURRENT = ("qwen3", "gemma3_text", "gpt2"), ("lfm2", "qwen3_next", "falcon_h1")


@dataclass(frozen=True)
class Plan:
    """One round.

    Attributes:
        kind: what drives the engine: its own caller turn by turn, threads on one LLM, or clients of the server in another process.
        captured: steps are recorded, on the tape that stands for CUDA graphs.
        own_capture: the model is traced again for this engine.
        turns: engine: turns of the loop; threads, server: calls.
        abrupt: closed, or shut down, in the middle of its work.
        tight: so little room that clients of the server are turned away for certain.
    """

    seed: int
    number: int
    kind: str
    model: str
    settings: dict[str, Any]
    captured: bool
    own_capture: bool
    turns: int
    abrupt: bool
    tight: bool = False

    @classmethod
    def of(cls, seed: int, number: int, kind: str | None = None) -> Plan:
        rng = random.Random(f"{seed}/{number}/plan")
        kind = kind or ORDER[number % len(ORDER)]
        recurrent = rng.random() < 0.3
        model = rng.choice(RECURRENT if recurrent else ATTENTION)
        captured = rng.random() < 0.4
        page_size = rng.choice([1, 4, 4, 16])
        # From barely one long request over a few that preempt each other to room for all.
        tokens = rng.choice([rng.randint(48, 110), rng.randint(110, 280), rng.randint(280, 500), 3000])
        settings: dict[str, Any] = {
            "page_size": page_size, "num_pages": tokens // page_size + 2, "max_batch_tokens": rng.choice([5, 16, 40, 256]),
            "max_requests": rng.choice([1, 3, 8, 16]), "prefix_cache": rng.random() < 0.85,
            "compile": recurrent or rng.random() < 0.75, "graphs": "auto" if captured else "off",
        }  # fmt: skip
        if captured:
            settings |= {"graph_decode_sizes": 2, "graph_extend_sizes": 2, "graph_sampling": rng.random() < 0.8}
            settings["graph_verify"] = not recurrent and rng.random() < 0.2
        if recurrent:
            settings["state_snapshots"] = rng.choice([None, None, 0, 3])
        settings |= {
            "overlap": rng.random() < 0.7,
            "policy": rng.choice(["fcfs", "lpm"]),
            "prefix_wait_tokens": rng.choice([0, 4, 16, 128]),
        }
        turns = {"engine": rng.choice([300, 600, 1200]), "threads": rng.choice([120, 300]), "server": rng.choice([120, 360])}[kind]
        own_capture = settings["compile"] and rng.random() < 0.15
        if own_capture:  # what engines do on GPUs; the shared captures are without
            settings |= {"merge_linears": True, "gemv": True}
        tight = kind == "server" and number % 24 == TIGHT
        if tight:
            settings["max_requests"] = 1
        return cls(seed, number, kind, model, settings, captured, own_capture, turns, number % 12 in ABRUPT, tight)

    def rng(self, purpose: str) -> random.Random:
        """Random numbers of their own for each purpose, so that threads do not share any."""
        return random.Random(f"{self.seed}/{self.number}/{purpose}")

    @property
    def with_nan(self) -> bool:
        """Whether there may be NaN: `graph_verify` takes it for a difference."""
        return not self.settings.get("graph_verify")

    @property
    def replay(self) -> str:
        kind = "" if self.kind == ORDER[self.number % len(ORDER)] else f" --kind {self.kind}"
        turns = "" if self.turns == Plan.of(self.seed, self.number, self.kind).turns else f" --turns {self.turns}"
        return f"OMP_NUM_THREADS=1 python -m tests.soak --seed {self.seed} --round {self.number}{kind}{turns}"

    def __str__(self) -> str:
        extras = [name for name in ("captured", "own_capture", "abrupt") if getattr(self, name)]
        chosen = " ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"round {self.number} {self.kind} {self.model} turns={self.turns} {chosen} {' '.join(extras)}".rstrip()
