"""`python -m tests.attack.victim ADDRESS`: the server under attack, in a process of its own, over the embedded model.

It connects to the attacker's listener, says where it listens, and answers commands: ("faults", rate), ("report",).
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import random
import re
import signal
import sys
import threading
import time
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

os.environ["PAGED_ATTN_TUNED"] = os.environ["PAGED_ATTN_CACHE"] = "none"

import psutil
import torch

from paged_attn import LLM
from paged_attn.asynchronous.texts import Texts
from paged_attn.engine.engine import Engine
from paged_attn.engine.sampling.structured.trials import GuideTrials
from paged_attn.server import state
from paged_attn.server.run import Server, allow_files, listen
from paged_attn.server.settings import ServerSettings
from tests.server.serving import TEMPLATE
from tests.soak.drive_server import ServerFaults

MODEL = Path(__file__).parents[2] / "paged_attn" / "demo_model"
KEYS = ("truth", "flood", "bombs", "fuzz")
PATIENCE = 60.0
MORE_OF_A_POOL = re.compile(r"_[1-9]\d*$")  # a pool starts its further threads when it first needs them
SETTINGS = ServerSettings(
    "demo", port=0, api_keys=KEYS, max_queue=24, max_requests_per_key=40, queue_seconds=1.5, request_seconds=40.0, max_body_mib=16.0,
    max_bodies_mib=64.0, max_connections=96, header_seconds=1.5, body_seconds=5.0, write_seconds=5.0, drain_seconds=10.0,
    allow_origins=("https://chat.example",), log_requests=True,
)  # fmt: skip


class Injected(RuntimeError):
    """The tokenizer failed because the attack wanted it to."""


class Victim:
    """A server with faults in its steps, its tokenizer and the process that reads guides."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.faults: ServerFaults | None = None
        self.rate, self.rng = 0.0, random.Random(0)
        self.injected = {"tokenizer": 0, "guide process": 0}
        state.sys.stdout = io.TextIOWrapper(open(os.devnull, "wb"))  # lines of the log
        self.server = Server(self._make, SETTINGS)
        self._break_tokenizer_and_guides()

    def _make(self) -> Engine:
        llm = LLM(MODEL, dtype=torch.float32, page_size=16, num_pages=32, max_requests=12, max_batch_tokens=256, overlap=True)
        llm.tokenizer.chat_template = TEMPLATE
        self.engine = llm.engine
        self.faults = ServerFaults(self.engine, random.Random(1))
        gc.freeze()
        return self.engine

    def _break_tokenizer_and_guides(self) -> None:
        ids, run = Texts._ids, GuideTrials.run

        def failing_ids(texts: Texts, *args: Any, **settings: Any) -> list[int]:
            if self.rng.random() < self.rate:
                self.injected["tokenizer"] += 1
                raise Injected("the tokenizer failed")
            return ids(texts, *args, **settings)

        def killed_run(trials: GuideTrials, *args: Any) -> Any:
            if trials._process is not None and self.rng.random() < 20 * self.rate:
                self.injected["guide process"] += 1
                os.kill(trials._process.pid, signal.SIGKILL)
            return run(trials, *args)

        Texts._ids, GuideTrials.run = failing_ids, killed_run  # type: ignore[method-assign]

    def _is_busy(self) -> bool:
        state = self.server.state
        assert self.engine is not None
        return bool(len(state.calls) or self.engine.has_work or state.llm.thread._failed_steps.probe_due or self.server.server_state.tasks)

    def set_faults(self, rate: float) -> None:
        assert self.faults is not None
        self.rate = self.faults.rate = rate

    def report(self) -> dict[str, Any]:
        """What is held and what was done, once nothing is under way."""
        engine, state, process = self.engine, self.server.state, psutil.Process()
        assert engine is not None and self.faults is not None
        ends = time.monotonic() + PATIENCE
        while time.monotonic() < ends and self._is_busy():
            time.sleep(0.1)
        assert state.llm.guide_pool is not None and state.llm.texts is not None
        _settle()
        kv, names = engine.kv, [thread.name for thread in threading.enumerate()]
        return {
            "calls": len(state.calls), "requests": len(engine.requests), "owners": len(state.llm.thread._owners),
            "waiting jobs": len(state.llm.thread._waiting), "pending": state.llm.thread._queue.num_unseen,
            "pages held": kv.held_pages, "locks": 0 if kv.tree is None else kv.tree.locked_pages,
            "clients of pools": len(state.llm.texts._pool._waiting) + len(state.llm.guide_pool._waiting),
            "connections": len(self.server.server_state.connections), "status": str(state.llm.thread.status),
            "threads": sorted(name for name in names if not MORE_OF_A_POOL.search(name)), "tasks": process.num_threads(),
            "files": process.num_fds(), "children": len(process.children(recursive=True)), "rss": process.memory_info().rss,
            "rss of children": sum(child.memory_info().rss for child in process.children(recursive=True)),
            "failed steps": self.faults.injected, **{f"failed {what}": count for what, count in self.injected.items()},
            "steps": engine.stats.steps, "new tokens": engine.stats.new_tokens, "preemptions": engine.scheduler.stats.preemptions,
        }  # fmt: skip


def _settle() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def serve_commands(victim: Victim, attacker: Connection) -> None:
    while True:
        try:
            command, *arguments = attacker.recv()
        except EOFError:  # the attacker is gone
            victim.server.should_exit = True
            return
        attacker.send(getattr(victim, command)(*arguments))


def main() -> None:
    torch.set_num_threads(1)
    attacker = Client(sys.argv[1])
    victim = Victim()
    allow_files(SETTINGS)
    socket = listen(SETTINGS)
    attacker.send((f"http://127.0.0.1:{socket.getsockname()[1]}", os.getpid()))
    threading.Thread(target=serve_commands, args=(victim, attacker), name="commands", daemon=True).start()
    victim.server.run(sockets=[socket])
    if victim.server.fatal_error is not None:
        raise victim.server.fatal_error


if __name__ == "__main__":
    main()
