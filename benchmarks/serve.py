"""The load of many clients on a server of OpenAI's API, ours or a peer's: each sends its next request when its last one is answered.

    paged-attn serve MODEL --port 8000 &
    python benchmarks/serve.py --url http://127.0.0.1:8000 --model NAME --load 1x3:512+128 --load 128x320:512+128 --out serve.json

A load is clients x requests : prompt tokens + new tokens. Prompts are random token ids, so that no two share a prefix; decoding is greedy,
and end tokens are ignored. Prints and writes new tokens per second, and percentiles of the time to the first token, between two reads
that brought tokens, and of whole requests. An answer with another number of tokens than wanted is an error. `--no-stream` asks for whole
answers, `--more '{"structured_outputs": {"regex": "[a-z ]{900,}"}}'` adds fields to each request.

The client reads sockets by itself, without a library: clients of 256 streams would otherwise need more time than the server.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import random
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paged_attn.bench.measure import spread

LOAD = re.compile(r"(\d+)x(\d+):(\d+)\+(\d+)")
IDS = "1000-30000"  # no special tokens of most vocabularies, and within them


@dataclass(frozen=True)
class Load:
    clients: int
    requests: int
    prompt: int
    new: int

    @classmethod
    def of(cls, text: str) -> Load:
        """Raises ValueError for what is none, which argparse tells."""
        if (found := LOAD.fullmatch(text)) is None:
            raise ValueError(text)
        return cls(*map(int, found.groups()))


class Clients:
    """Those of one load; times in seconds."""

    def __init__(self, options: argparse.Namespace, load: Load) -> None:
        self.options, self.load, self.address = options, load, urlsplit(options.url)
        self.first_tokens, self.gaps, self.latencies = list[float](), list[float](), list[float]()
        self.errors = list[str]()
        self._random, (self._first, self._last) = random.Random(options.seed), map(int, options.ids.split("-"))

    async def run(self) -> dict[str, Any]:
        turns = asyncio.Semaphore(self.load.clients)

        async def one() -> None:
            async with turns:
                await self._request()

        begun = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(self.load.requests)))
        seconds = time.perf_counter() - begun
        answered = self.load.requests - len(self.errors)
        return {
            **vars(self.load), "stream": self.options.stream, "seconds": seconds, "tokens_per_second": answered * self.load.new / seconds,
            "first_token": spread(self.first_tokens) if self.first_tokens else None,
            "between_tokens": spread(self.gaps) if self.gaps else None, "request": spread(self.latencies), "errors": self.errors,
        }  # fmt: skip

    async def _request(self) -> None:
        prompt = [self._random.randint(self._first, self._last) for _ in range(self.load.prompt)]
        streamed = {"stream_options": {"include_usage": True}} if self.options.stream else {}
        body = {"model": self.options.model, "prompt": prompt, "max_tokens": self.load.new, "temperature": 0, "ignore_eos": True}
        body |= self.options.more
        data = json.dumps({**body, "stream": self.options.stream, **streamed}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self.address.netloc}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        reader, writer = await asyncio.open_connection(self.address.hostname, self.address.port)
        begun = last = time.perf_counter()
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        end = b""
        while part := await reader.read(1 << 16):
            if b"data: {" in part:
                now = time.perf_counter()
                (self.gaps if last > begun else self.first_tokens).append(now - last)
                last = now
            end = (end + part)[-4000:]
        writer.close()
        self.latencies.append(time.perf_counter() - begun)
        counts = re.findall(rb'"completion_tokens": ?(\d+)', end)
        if not counts or int(counts[-1]) != self.load.new:
            self.errors.append(end[-300:].decode(errors="replace"))


def line(measured: dict[str, Any]) -> str:
    name = f"{measured['clients']} clients, {measured['prompt']} + {measured['new']}{'' if measured['stream'] else ', whole answers'}"
    times = [
        f"{what.replace('_', ' ')} {' / '.join(f'{value * 1e3:.4g}' for value in found.values())}"
        for what in ("first_token", "between_tokens", "request") if (found := measured[what])
    ]  # fmt: skip
    failed = f"; {len(measured['errors'])} FAILED: {measured['errors'][0]}" if measured["errors"] else ""
    return f"{name}: {measured['tokens_per_second']:,.1f} tokens/s; p50 / p90 / p99 in ms: {'; '.join(times)}{failed}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="the name that the server gives it")
    parser.add_argument("--load", type=Load.of, action="append", required=True, metavar="CLIENTSxREQUESTS:PROMPT+NEW")
    parser.add_argument("--no-stream", dest="stream", action="store_false")
    parser.add_argument("--ids", default=IDS, metavar="FIRST-LAST", help="of the tokens in prompts")
    parser.add_argument("--more", type=json.loads, default={}, metavar="JSON", help="further fields of each request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    warm = Load(options.load[-1].clients, 2 * options.load[-1].clients, 16, 4)
    asyncio.run(Clients(options, warm).run())
    measured = []
    for load in options.load:
        measured.append(asyncio.run(Clients(options, load).run()))
        print(line(measured[-1]), flush=True)
    if options.out is not None:
        date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M UTC}"
        command = " ".join(["python benchmarks/serve.py", *(sys.argv[1:] if arguments is None else arguments)])
        options.out.write_text(json.dumps({"date": date, "command": command, "loads": measured}, indent=1))
    return any(each["errors"] for each in measured)


if __name__ == "__main__":
    sys.exit(main())
