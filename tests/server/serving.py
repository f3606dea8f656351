"""A server in a thread, over a tiny engine, and ways to hold that engine up."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from paged_attn.engine.engine import Engine
from paged_attn.server.logs.tracing import Tracing
from paged_attn.server.run import Server, listen
from paged_attn.server.settings import ServerSettings
from tests.engine.models import assert_idle, make_engine, tokenizer

MODEL = "tiny"
TEMPLATE = "{% for m in messages %}{{ m.role }}> {{ m.content }}; {% endfor %}{% if add_generation_prompt %}assistant>{% endif %}"
PATIENCE = 30.0


def chat_tokenizer() -> Any:
    own = copy.deepcopy(tokenizer())
    own.chat_template = TEMPLATE
    return own


@dataclass
class Running:
    """A server that answers; `http` and `client` have its address, and the API key if there is one."""

    server: Server
    url: str
    http: httpx.Client
    client: openai.OpenAI
    thread: threading.Thread

    @property
    def engine(self) -> Engine:
        engine = self.server.state.llm.thread.engine
        assert engine is not None
        return engine

    @property
    def num_prompts(self) -> int:
        """Those that were submitted and have not ended, as far as the engine's thread has said."""
        thread = self.server.state.llm.thread
        with thread._condition:  # else one that moves on in between counts twice
            return thread._queue.num_unseen + thread.snapshot.waiting + thread.snapshot.running

    def stop(self) -> None:
        """As a signal does, but without waiting."""
        self.server.should_exit = True

    def metric(self, name: str, labels: str = "") -> float:
        """A sample of /metrics, such as ("requests", 'state="running"')."""
        wanted = f"paged_attn_{name}{{{labels}}} " if labels else f"paged_attn_{name} "
        (line,) = [line for line in self.http.get("/metrics").text.splitlines() if line.startswith(wanted)]
        return float(line.split(" ")[-1])

    def wait_idle(self) -> None:
        """Until no request is left; then nothing may be held."""
        wait_for(lambda: self.metric("requests", 'state="running"') + self.metric("requests", 'state="waiting"') == 0)
        wait_for(lambda: self.metric("kv_pages", 'state="used"') == 0)
        failed_steps = self.server.state.llm.thread._failed_steps  # after one, a probe runs
        wait_for(lambda: not failed_steps.probe_due and not self.engine.has_work)
        assert_idle(self.engine)
        assert not self.server.state.llm.thread._owners and not self.server.state.llm.thread._started


@contextlib.contextmanager
def serving(
    make: Callable[[], Engine] | None = None,
    *,
    wait: bool = True,
    on_ready: Callable[[Engine], None] | None = None,
    tracing: Tracing | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """A server of its own on a free port; ended, with all that it started, at the end."""
    make = make or (lambda: make_engine(tokenizer=chat_tokenizer()))
    all_settings = ServerSettings(**{"model_name": MODEL, "port": 0, "drain_seconds": 0.0, **settings})
    server, socket = Server(make, all_settings, on_ready=on_ready, tracing=tracing), listen(all_settings)
    url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    key = all_settings.api_keys[0] if all_settings.api_keys else "none"
    with (
        httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE) as http,
        openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE) as client,
    ):
        try:
            if wait:
                wait_for(lambda: http.get("/health").status_code == 200)
            yield Running(server, url, http, client, thread)
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.01)


@contextlib.contextmanager
def held(engine: Engine) -> Iterator[threading.Semaphore]:
    """Inside, every step waits for a permit: `release(n)` lets n steps go. At the end all go."""
    permits, run, ended = threading.Semaphore(0), engine.step_runner.run, threading.Event()

    def waiting(*args: Any) -> Any:
        while not ended.is_set() and not permits.acquire(timeout=0.01):
            pass
        return run(*args)

    engine.step_runner.run = waiting  # type: ignore[method-assign]
    try:
        yield permits
    finally:
        ended.set()
        engine.step_runner.run = run  # type: ignore[method-assign]
