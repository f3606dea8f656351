"""`python -m tests.soak.client TABLE URL SEED CALLS`: the server's clients, in a process of their own, without torch.

TABLE is a JSON file: {"exchanges": [{"path", "body", "status", "choices"}], "faults": bool, "abrupt": bool}. Prints {"seen", "problems"}.
Each of some workers takes an exchange at random and asks for it whole or as a stream; some hang up on the way.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

WORKERS = 12
IDLE = httpx.Limits(keepalive_expiry=2)  # shorter than the server's 5 s, or both give an idle connection up at once
PATIENCE = 60.0
LOGPROB_ERROR = 2e-3
GONE = (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError)


class Ended(Exception):
    """The server shut down, as the soak wanted."""


@dataclass
class Heard:
    """One choice, put together from its parts."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    stop_reason: Any = None
    logprobs: list[float] | None = None

    def take(self, choice: dict[str, Any]) -> None:
        assert self.reason is None, f"a part after the end: {choice}"
        message = choice.get("delta") or choice.get("message")
        self.text += (message.get("content") or "") if message is not None else choice.get("text") or ""
        self.tokens += choice.get("token_ids") or []
        self.reason, self.stop_reason = choice.get("finish_reason"), choice.get("stop_reason")
        if (given := choice.get("logprobs")) is not None:
            own = [entry["logprob"] for entry in given["content"]] if "content" in given else given["token_logprobs"]
            self.logprobs = (self.logprobs or []) + own

    def problem(self, expected: dict[str, Any], whole: bool) -> str | None:
        """What differs from a choice as expected; of one that is not whole only what came is looked at."""
        size = len(self.tokens)
        if self.tokens != expected["tokens"][: None if whole else size]:
            return "tokens"
        if whole and (self.text, self.reason, self.stop_reason) != (expected["text"], expected["reason"], expected["stop_reason"]):
            return "the end"
        if not expected["text"].startswith(self.text):
            return "text"
        if self.logprobs is not None and any(
            abs(a - b) > LOGPROB_ERROR for a, b in zip(self.logprobs, expected["logprobs"][:size], strict=True)
        ):
            return "log-probabilities"
        return None


class Clients:
    def __init__(self, table: dict[str, Any], url: str, seed: str, calls: int) -> None:
        self.exchanges, self.faults, self.abrupt = table["exchanges"], table["faults"], table["abrupt"]
        self.url, self.seed, self.calls = url, seed, calls
        self.seen, self.problems = Counter[str](), list[str]()

    async def run(self) -> None:
        await asyncio.gather(*(self._worker(number) for number in range(WORKERS)))

    async def _worker(self, number: int) -> None:
        rng = random.Random(f"{self.seed}/{number}")
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, limits=IDLE) as http:
            for _ in range(self.calls // WORKERS):
                kind = rng.choice(["whole", "whole", "stream", "stream", "leave", "hang up", "look", "half"])
                exchange = rng.choice(self.exchanges)
                try:
                    await getattr(self, "_" + kind.replace(" ", "_"))(http, rng, exchange)
                    self.seen[f"calls: {kind}"] += 1
                except Ended:
                    self.seen["calls: shut down"] += 1
                    return
                except (AssertionError, httpx.HTTPError, LookupError, ValueError) as error:
                    if self.abrupt and isinstance(error, GONE):
                        self.seen["calls: shut down"] += 1
                        return
                    self.problems.append(f"{kind} {json.dumps(exchange)}: {type(error).__name__}: {error}")

    async def _whole(self, http: httpx.AsyncClient, rng: random.Random, exchange: dict[str, Any]) -> None:
        reply = await http.post(exchange["path"], json=exchange["body"])
        if await self._is_excused(reply.status_code, reply.text, exchange):
            return
        assert reply.status_code == exchange["status"], f"got {reply.status_code}: {reply.text[:300]}"
        if reply.status_code == 200:
            heard = [Heard() for _ in exchange["choices"]]
            for choice in reply.json()["choices"]:
                heard[choice["index"]].take(choice)
            self._compare(heard, exchange, whole=True)
        else:
            assert reply.json()["error"]["message"]
            self.seen[f"answers: {reply.status_code}"] += 1

    async def _stream(self, http: httpx.AsyncClient, rng: random.Random, exchange: dict[str, Any], most: int | None = None) -> None:
        """Read the stream, or hang up after `most` parts."""
        heard, failed, done = [Heard() for _ in exchange["choices"]], "", False
        async with http.stream("POST", exchange["path"], json={**exchange["body"], "stream": True}) as reply:
            if reply.status_code != 200:
                text = (await reply.aread()).decode()
                if not await self._is_excused(reply.status_code, text, exchange):
                    assert reply.status_code == exchange["status"], f"got {reply.status_code}: {text[:300]}"
                return
            parts = 0
            async for line in reply.aiter_lines():
                if not line:
                    continue
                assert not done, f"a line after the end: {line}"
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    done = True
                elif "error" in (part := json.loads(data)):
                    failed = json.dumps(part)
                else:
                    for choice in part["choices"]:
                        heard[choice["index"]].take(choice)
                parts += 1
                if parts == most:
                    break
        if failed:
            code = json.loads(failed)["error"]["code"]
            assert (code == "step_failed" and self.faults) or (code == "bad_logits" and exchange["status"] == 500) or (
                code == "shutting_down" and self.abrupt
            ), f"the stream failed: {failed}"  # fmt: skip
            self.seen[f"answers: {code} in a stream"] += 1
        elif most is None:
            assert done, "the stream has no end"
            assert exchange["status"] == 200, "a stream that had to fail did not"
        if exchange["choices"]:
            self._compare(heard, exchange, whole=most is None and not failed)

    async def _leave(self, http: httpx.AsyncClient, rng: random.Random, exchange: dict[str, Any]) -> None:
        await self._stream(http, rng, exchange, rng.randint(1, 12))

    async def _hang_up(self, http: httpx.AsyncClient, rng: random.Random, exchange: dict[str, Any]) -> None:
        """Ask on a connection of its own, and close it after a moment."""
        async with httpx.AsyncClient(base_url=self.url) as own:
            try:
                reply = await own.post(exchange["path"], json=exchange["body"], timeout=rng.choice([0.001, 0.01, 0.05, 0.3]))
            except httpx.TimeoutException:
                self.seen["hung up"] += 1
            else:
                await self._is_excused(reply.status_code, reply.text, exchange)

    async def _look(self, http: httpx.AsyncClient, rng: random.Random, exchange: dict[str, Any]) -> None:
        path = rng.choice(["/health", "/metrics", "/v1/models", "/nothing"])
        reply = await http.get(path)
        if not await self._is_excused(reply.status_code, reply.text, exchange):
            assert (reply.status_code == 200) == (path != "/nothing"), f"{path}: {reply.status_code} {reply.text[:300]}"

    async def _half(self, http: httpx.AsyncClient, rng: random.Random, exchange: dict[str, Any]) -> None:
        """Hang up in the middle of the body."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError as error:
            if self.abrupt:
                raise Ended from error
            raise
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{")
        await writer.drain()
        writer.close()

    def _compare(self, heard: list[Heard], exchange: dict[str, Any], whole: bool) -> None:
        for got, expected in zip(heard, exchange["choices"], strict=True):
            problem = got.problem(expected, whole)
            assert problem is None, f"wrong: {problem}\n  got      {got}\n  expected {expected}"
            self.seen["choices"] += 1

    async def _is_excused(self, status: int, text: str, exchange: dict[str, Any]) -> bool:
        """Whether the soak itself is the reason why the answer is another one."""
        code = json.loads(text)["error"]["code"] if status in (500, 503, 429) and '"error"' in text else None
        if code == "step_failed" and self.faults:
            self.seen["answers: step_failed"] += 1
            return True
        if status == 429:
            await asyncio.sleep(0.02)
            self.seen["answers: 429"] += 1
            return True
        if status == 503 and self.abrupt:
            raise Ended
        return False


def main() -> None:
    path, url, seed, calls = sys.argv[1:]
    clients = Clients(json.loads(Path(path).read_text()), url, seed, int(calls))
    asyncio.run(clients.run())
    print(json.dumps({"seen": clients.seen, "problems": clients.problems}))


if __name__ == "__main__":
    main()
