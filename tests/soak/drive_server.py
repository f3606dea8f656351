"""The server in this process under clients in another one: load, disconnects, bad requests, failed steps, and shutdowns."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from paged_attn import SamplingParams
from paged_attn.engine.engine import Engine
from tests.engine.models import poisoned, tokenizer
from tests.server.serving import Running, serving, wait_for
from tests.soak.build import Faults, assert_closed, book_of, make_llm, model_of
from tests.soak.cases import BAD, NEW, Book, Case, Outcome, ending
from tests.soak.drive_engine import engine_counts
from tests.soak.plan import Plan

EXCHANGES = 80
FAULT_RATE = 0.01
CLIENT_SECONDS = 240.0
ROOT = Path(__file__).resolve().parents[2]
BAD_BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": [1], "max_tokens": "many"},
    {"prompt": [1], "temperature": -1},
    {"prompt": [1], "best_of": 3},
    {"prompt": [1], "unheard_of": 1},
    {},
)


class ServerFaults(Faults):
    """Spares the server's probe of an engine that failed: if that fails too, the engine rightly counts as dead."""

    def spare(self) -> bool:
        return all(request.prompt_token_ids == [0] for request in self.engine.requests.values())


def exchange_of(case: Case, rng: random.Random) -> dict[str, Any]:
    """A case over HTTP."""
    params = case.params
    body: dict[str, Any] = {
        "prompt": case.prompt, "max_tokens": params.max_new_tokens, "temperature": params.temperature, "top_p": params.top_p,
        "top_k": params.top_k, "min_p": params.min_p, "repetition_penalty": params.repetition_penalty, "seed": params.seed,
        "stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids), "logprobs": params.logprobs, "return_token_ids": True,
        "logit_bias": {str(token): bias for token, bias in dict(params.logit_bias).items()}, "regex": params.regex,
        "cache_salt": rng.choice([None, None, "tenant"]),
    }  # fmt: skip
    return {"path": "/v1/completions", "body": body, "status": 500 if case.nan else 200, "choices": [choice_of(case.expected)]}


def choice_of(expected: Outcome) -> dict[str, Any]:
    return {
        "tokens": list(expected.tokens), "text": expected.text, "reason": expected.reason, "stop_reason": expected.stop_reason,
        "logprobs": list(expected.logprobs or ()),
    }  # fmt: skip


def chats(book: Book, rng: random.Random) -> list[dict[str, Any]]:
    """Conversations in the template of `tests.server.serving`."""
    made = []
    for words in ("Hi", "What is a page?", "Say nothing, then stop; please."):
        said = book.say(tokenizer()(f"user> {words}; assistant>", add_special_tokens=False).input_ids)
        params = SamplingParams(max_new_tokens=min(rng.randint(1, NEW), len(said.tokens)))
        body = {
            "messages": [{"role": "user", "content": words}], "max_completion_tokens": params.max_new_tokens, "temperature": 0,
            "logprobs": True, "top_logprobs": rng.choice([0, 3]), "return_token_ids": True,
        }  # fmt: skip
        if params.max_new_tokens:
            choices = [choice_of(ending(said, params))]
            made.append({"path": "/v1/chat/completions", "body": body, "status": 200, "choices": choices})
    return made


def exchanges(book: Book, rng: random.Random, engine: Engine) -> list[dict[str, Any]]:
    """What clients may ask, with the right answer: completions of one prompt and of several, chats, and what is refused."""
    made: list[dict[str, Any]] = []
    while len(made) < EXCHANGES:
        case = book.case(rng)
        params = case.params
        if case.free or params.logits_processors or params.frequency_penalty or params.presence_penalty:
            continue
        exchange = exchange_of(case, rng)
        if case.num_pages(engine.config.page_size) > engine.kv.max_request_pages:
            exchange |= {"status": 400, "choices": []}
        elif not case.nan and len(made) % 5 == 0:  # the same prompt several times over
            exchange["body"] |= {"n": 3} if params.is_greedy and rng.random() < 0.5 else {"prompt": [case.prompt] * 3}
            exchange["choices"] = [choice_of(case.expected)] * 3
        made.append(exchange)
    for prompt, settings in BAD:
        if not settings and prompt != ["a"]:  # a list of texts
            made.append({"path": "/v1/completions", "body": {"prompt": prompt, "max_tokens": 2}, "status": 400, "choices": []})
    made += [{"path": "/v1/completions", "body": body, "status": 400, "choices": []} for body in BAD_BODIES]
    made.append({"path": "/v1/completions", "body": {"prompt": [1], "model": "another"}, "status": 404, "choices": []})
    return made


def drive(plan: Plan) -> Counter[str]:
    book, rng = book_of(plan), plan.rng("server")
    talks = chats(book, rng)
    kept: list[Engine] = []

    def make() -> Engine:
        kept.append(make_llm(plan).engine)
        return kept[0]

    queue = 2 if plan.tight else rng.choice([4, 1000])  # three prompts come as one request
    with serving(make, max_queue=queue) as running, tempfile.TemporaryDirectory() as folder, poisoned(model_of(plan)):
        faults = ServerFaults(running.engine, plan.rng("faults"), rng.choice([0.0, FAULT_RATE]))
        table = Path(folder) / "table.json"
        asked = exchanges(book, rng, running.engine)
        asked += [talk for talk in talks if running.engine.kv.num_usable * running.engine.config.page_size > 90]
        table.write_text(json.dumps({"exchanges": asked, "faults": bool(faults.rate), "abrupt": plan.abrupt}))
        seen = run_clients(plan, running, table, rng)
        thread = running.server.state.llm.thread
        if not plan.abrupt:
            running.wait_idle()
            wait_for(lambda: not thread._failed_steps.probe_due)
            assert running.http.get("/health").status_code == 200, running.http.get("/health").text
            assert running.metric("failed_steps_total") == faults.injected
    engine = kept[0]
    assert_closed(engine)
    left = {name: getattr(thread, name) for name in ("_owners", "_started", "_queue", "_cancels")} | {"unseen": thread._queue.num_unseen}
    assert not any(left.values()), f"the server's thread still has {left}"
    assert not thread._thread.is_alive()
    faults.remove()
    return seen + engine_counts(engine) + Counter({"failed steps": faults.injected})


def run_clients(plan: Plan, running: Running, table: Path, rng: random.Random) -> Counter[str]:
    command = [sys.executable, "-m", "tests.soak.client", str(table), running.url, f"{plan.seed}/{plan.number}", str(plan.turns)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            if plan.abrupt:
                wait_for(lambda: running.engine.stats.steps > rng.randint(1, 100) or process.poll() is not None)
                running.stop()
            output, _ = process.communicate(timeout=CLIENT_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 0, f"the clients ended with status {process.returncode}: {output}"
    report = json.loads(output)
    assert not report["problems"], "\n".join([f"{len(report['problems'])} problems of clients", *report["problems"][:5]])
    return Counter(report["seen"])
