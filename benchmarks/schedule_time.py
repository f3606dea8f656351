"""Host time of `Scheduler.schedule` alone, without a model: 256 running decodes, with and without 10,000 waiting behind them.

python benchmarks/schedule_time.py [--running 256] [--waiting 10000] [--steps 400]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from paged_attn import EngineConfig, SamplingParams
from paged_attn.engine.memory.kv_manager import KVManager
from paged_attn.engine.requests.detokenizer import IncrementalDetokenizer
from paged_attn.engine.requests.request import Request
from paged_attn.engine.sampling.sampling_state import SamplingState
from paged_attn.engine.scheduling.scheduler import Scheduler

PROMPT = 512


def request(rng: random.Random, arrival: int, tenant: int) -> Request:
    tokens = [rng.randrange(100_000) for _ in range(rng.randrange(PROMPT - 64, PROMPT))]
    params = SamplingParams()
    return Request(
        id=str(arrival), prompt_token_ids=list(tokens), params=params, stop_token_ids=frozenset(), max_new_tokens=10**6,
        sampling=SamplingState(params, tokens), detokenizer=IncrementalDetokenizer(None), arrival=arrival, namespace=tenant, tokens=tokens,
    )  # fmt: skip


def step(scheduler: Scheduler) -> tuple[float, int]:
    """Microseconds that the next step took to schedule, and how many requests it has; each gets its token at once."""
    started = time.perf_counter()
    scheduled = scheduler.schedule()
    seconds = time.perf_counter() - started
    for request, count, samples in zip(scheduled.requests, scheduled.counts.tolist(), scheduled.samples.tolist(), strict=True):
        request.num_cached += count
        if samples:
            request.num_tokens += 1
            request.num_validated = request.num_cached
            request.tokens.append(1)
    return seconds * 1e6, len(scheduled)


def measure(running: int, waiting: int, steps: int, policy: str) -> list[float]:
    """Of each step in which `running` requests decode and `waiting` ones cannot run, microseconds."""
    rng = random.Random(0)
    pages = running * (PROMPT + steps + 64) // 16 + 1000
    scheduler = Scheduler(EngineConfig(policy=policy, max_requests=running, max_batch_tokens=16384), KVManager(pages, 16, True))
    for arrival in range(running + waiting):
        scheduler.waiting.append(request(rng, arrival, arrival % 100))
    while len(scheduler.running) < running or step(scheduler)[1] < running:
        step(scheduler)
    return [step(scheduler)[0] for _ in range(steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    for waiting in (0, args.waiting):
        for policy in ("fcfs", "lpm"):
            times = sorted(measure(args.running, waiting, args.steps, policy))
            print(
                f"{args.running} running, {waiting:6,} waiting, {policy}: median {statistics.median(times):.1f} us, "
                f"99th of 100 {times[len(times) * 99 // 100]:.1f}"
            )


if __name__ == "__main__":
    main()
