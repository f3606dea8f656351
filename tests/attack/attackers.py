"""What is done to the server: each function is one attack, and says what it expects of an answer."""

from __future__ import annotations

import ast
import contextlib
import json
import random
import socket
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from tests.attack.truth import Question
from tests.engine.sampling.test_guide_trials import BOMBS as GUIDE_BOMBS
from tests.engine.sampling.test_guide_trials import DEEP_GUIDES, PATTERNS
from tests.server.test_bombs import BOMBS

TIMEOUT = 60.0
JSON = {"Content-Type": "application/json"}
# Answers that the attack itself is the reason for: it floods, takes long, and lets steps and the tokenizer fail.
BUSY = (429, 503, 504)
FAILED = ("step_failed", "internal_error")
STREAM_ERRORS = ("step_failed", "request_timeout", "queue_timeout", "queue_full")  # a stream has begun before it knows whether it may run
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
BYTES = (b"", b"\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"A" * 70_000,
         b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
         b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
         b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 30_000 + b"\r\n\r\n")  # fmt: skip


def one_at_a_time(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Python 3.11 counts the recursion of ast.parse for all threads together, and fails if two parse at once; Hypothesis parses the
    lambdas of strategies, and several attackers draw from them."""
    lock = threading.RLock()

    def locked(*args: Any, **settings: Any) -> Any:
        with lock:
            return parse(*args, **settings)

    return locked


ast.parse = one_at_a_time(ast.parse)


class Attack:
    """One attacker's thread: its own random numbers and connection, and what it saw.

    Attributes:
        seen: answers by attack and status, and `bodies`, `requests`.
        problems: what should not have happened.
    """

    def __init__(self, url: str, name: str, seed: str, questions: list[Question], document: Any) -> None:
        self.url, self.name, self.rng, self.questions = url, name, random.Random(seed), questions
        self.seen: Counter[str] = Counter()
        self.problems: list[str] = []
        self.port = int(url.rpartition(":")[2])
        # Shorter than the server's 5 s, or both give an idle connection up at once, and a request on it is reset.
        self.http = httpx.Client(base_url=url, timeout=TIMEOUT, limits=httpx.Limits(keepalive_expiry=2))
        self.schema = schemathesis.openapi.from_dict(document)
        self.operations = [
            (operation, mode)
            for result in self.schema.get_all_operations()
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
            # There is no wrong way to send what takes nothing.
            if (operation := result.ok()).body or mode is GenerationMode.POSITIVE  # type: ignore[union-attr]
        ]

    def attack(self, kind: str) -> None:
        """Once; what is raised is a problem."""
        try:
            getattr(self, kind)()
        except (AssertionError, httpx.HTTPError, OSError, LookupError, ValueError, FailureGroup) as error:
            self.problems.append(f"{self.name} {kind}: {type(error).__name__}: {str(error)[:800]}")

    def post(self, path: str, content: bytes, key: str, **headers: str) -> httpx.Response:
        self.seen["bodies"] += 1
        reply = self.http.post(path, content=content, headers={**JSON, "Authorization": f"Bearer {key}", **headers})
        self.note(reply)
        return reply

    def note(self, reply: httpx.Response) -> None:
        self.seen["requests"] += 1
        self.seen[f"status {reply.status_code}"] += 1
        assert "x-request-id" in reply.headers and b"Traceback" not in reply.content and b"backtrace" not in reply.content, reply.text[:300]
        if reply.status_code >= 400:
            error = reply.json()["error"]
            assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) <= 1003, reply.text[:300]
            assert reply.status_code != 500 or error["code"] in FAILED, reply.text[:300]

    def ask_truth(self) -> None:
        """A question whose answer is known, whole or streamed."""
        question, streams = self.rng.choice(self.questions), self.rng.random() < 0.5
        body = {**question.body, "stream": streams, "cache_salt": self.rng.choice([None, "a", "b"])}
        reply = self.post(question.path, json.dumps(body).encode(), "truth")
        if reply.status_code in (*BUSY, 500):
            self.seen["answers: busy or failed"] += 1
            return
        assert reply.status_code == 200, reply.text[:300]
        if (ids := ids_of(reply.text, streams)) is None:
            self.seen["answers: busy or failed"] += 1
            return
        self.seen["answers"] += 1
        assert ids == question.ids, f"wrong answer to {question.body}: {ids}, not {question.ids}"

    def fuzz(self) -> None:
        """Bodies, paths and headers that schemathesis makes of /openapi.json, those that keep to it and those that do not."""
        operation, mode = self.rng.choice(self.operations)

        @settings(max_examples=40, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
        @given(operation.as_strategy(generation_mode=mode))
        def run(case: Any) -> None:
            if isinstance(case.body, dict):
                self.seen["bodies"] += 1
                case.body.pop("model", None)
                if mode is GenerationMode.POSITIVE:
                    case.body |= short_answers(case.path, self.rng)
            reply = case.call(base_url=self.url, timeout=TIMEOUT, headers={"Authorization": "Bearer fuzz"})
            self.seen["requests"] += 1
            self.seen[f"status {reply.status_code}"] += 1
            case.validate_response(reply, checks=CHECKS)
            failed = reply.status_code == 500 and reply.json()["error"]["code"] in FAILED
            assert reply.status_code < 500 or reply.status_code in BUSY or failed, reply.text[:300]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()

    def bomb(self) -> None:
        name = self.rng.choice(sorted(BOMBS))
        path, content = BOMBS[name]
        reply = self.post(path or "/v1/completions", content, "bombs")
        assert reply.status_code in (400, 500, *BUSY), f"{name}: {reply.status_code} {reply.text[:300]}"

    def guide_bomb(self) -> None:
        kind = self.rng.choice(["bad", "bad", "deep", "long"])
        asked = {
            "bad": lambda: self.rng.choice(list(GUIDE_BOMBS.values()))[0], "deep": lambda: self.rng.choice(list(DEEP_GUIDES.values())),
            "long": lambda: {"json_schema": PATTERNS},
        }[kind]()  # fmt: skip
        body = {"prompt": "Answer: ", "max_tokens": 20, **asked}
        reply = self.post("/v1/completions", json.dumps(body).encode(), "bombs")
        allowed = (200, 400) if kind == "deep" else (400,)
        assert reply.status_code in (*allowed, *BUSY, 500), f"{asked}: {reply.status_code} {reply.text[:300]}"

    def flood(self) -> None:
        """More at once than the queue holds, of which some hang up."""
        with contextlib.ExitStack() as open_ones:
            held: list[socket.socket] = []
            for number in range(self.rng.randint(5, 40)):
                body = json.dumps(
                    {"prompt": f"Flood {number}", "max_tokens": self.rng.randint(1, 120), "n": self.rng.choice([1, 2])}
                ).encode()
                raw = open_ones.enter_context(self.connect())
                self.send(raw, body, "flood")
                held.append(raw)
            self.seen.update(bodies=len(held), requests=len(held))
            time.sleep(self.rng.choice([0.0, 0.1, 1.0]))
            for raw in held:
                raw.setblocking(False)
                with contextlib.suppress(OSError):
                    self.seen[f"status {raw.recv(12)[9:].decode()}"] += 1
        self.seen["hung up"] += len(held)

    def slow(self) -> None:
        """Connections that send next to nothing, or read nothing."""
        with contextlib.ExitStack() as open_ones:
            for _ in range(self.rng.randint(1, 10)):
                raw = open_ones.enter_context(self.connect())
                kind = self.rng.choice(["silent", "head", "body", "reader"])
                with contextlib.suppress(OSError):
                    if kind == "head":
                        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost")
                    elif kind == "body":
                        self.send(raw, b"{", "bombs", length=10_000)
                    elif kind == "reader":
                        for _ in range(50):
                            raw.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
            time.sleep(self.rng.choice([0.2, 2.0]))
        self.seen["slow connections"] += 1

    def garbage(self) -> None:
        with self.connect() as raw, contextlib.suppress(OSError):
            raw.sendall(self.rng.choice(BYTES) + self.rng.randbytes(self.rng.choice([0, 10, 5000])))
            raw.settimeout(0.2)
            raw.recv(1000)
        self.seen["garbage"] += 1

    def cancel(self) -> None:
        """A request that is ended by its id, or by its deadline, from another thread."""
        id, ended = f"mine-{self.rng.randrange(10**9)}", threading.Event()
        body = {"prompt": "Once", "max_tokens": 400, "stream": self.rng.random() < 0.5, "timeout_seconds": self.rng.choice([None, 0.3])}

        def end() -> None:
            ended.wait(self.rng.choice([0.0, 0.05, 0.5]))
            reply = httpx.post(f"{self.url}/v1/requests/{id}/cancel", headers={"Authorization": "Bearer flood"}, timeout=TIMEOUT)
            assert reply.status_code in (200, 404, 429, 503), reply.text[:300]

        thread = threading.Thread(target=end)
        thread.start()
        try:
            reply = self.post("/v1/completions", json.dumps(body).encode(), "flood", **{"x-request-id": id})
            assert reply.status_code in (200, 499, 500, *BUSY) and reply.headers["x-request-id"] == id, reply.text[:300]
        finally:
            ended.set()
            thread.join()
        self.seen["ended by id or deadline"] += 1

    def look(self) -> None:
        for path in ("/health/live", "/health/ready", "/metrics", "/version", "/docs", "/v1/models", "/nothing"):
            reply = self.http.get(path, headers={"Authorization": "Bearer truth"})
            self.note(reply)
            assert reply.status_code == (404 if path == "/nothing" else 200), f"{path}: {reply.status_code} {reply.text[:300]}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)

    def send(self, raw: socket.socket, body: bytes, key: str, length: int | None = None) -> None:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer {key}\r\n"
        with contextlib.suppress(OSError):
            raw.sendall(f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body)


def short_answers(path: str, rng: random.Random) -> dict[str, int]:
    """Fields that keep what a route has to do small."""
    if path == "/v1/responses":
        return {"max_output_tokens": rng.randint(0, 8)}
    return {"max_tokens": rng.randint(0, 8), "n": rng.choice([1, 1, 2])} if path.startswith("/v1") else {}


def ids_of(text: str, streams: bool) -> list[int] | None:
    """The token ids of an answer; None if the stream ended with an error that the attack is the reason for."""
    if not streams:
        ids: list[int] = json.loads(text)["choices"][0]["token_ids"]
        return ids
    ids = []
    for line in text.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        part = json.loads(line.removeprefix("data: "))
        if "error" in part:
            assert part["error"]["code"] in STREAM_ERRORS, part
            return None
        ids += part["choices"][0].get("token_ids") or []
    return ids


# How often each is chosen.
KINDS = {"ask_truth": 3, "fuzz": 3, "bomb": 3, "guide_bomb": 2, "flood": 2, "slow": 1, "garbage": 1, "cancel": 2, "look": 1}
