"""`python -m tests.soak --minutes 60 [--seed N]`: everything at once, at random, on tiny models and the CPU, until the time is up.

Each round makes an engine with settings of its own and drives it: turn by turn, from several threads, or as a server under clients in
another process. Every answer is compared with what the unmodified model says to that prompt alone, and after a round no page, lock, slot,
graph, thread, file or child process may be left, nor may memory have grown. A failed round prints its seed, its number and the line that
runs it again. The exit status is 1 if any failed, or if something never happened that must have.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import sys
import time
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PAGED_ATTN_TUNED"] = os.environ["PAGED_ATTN_CACHE"] = "none"

import torch
import transformers

from tests.soak.plan import KINDS, Plan
from tests.soak.run import Soak

LONG = 12  # rounds after which everything must have been seen
WANTED = (
    "requests", "ended: length", "ended: stop", "ended: error", "ended: cancelled", "cancelled", "refused: bad", "refused: too large",
    "failed steps", "preemptions", "cached tokens", "sampled", "calls that failed: NaN", "calls that failed: step", "calls: drop",
    "calls: refused", "calls: leave", "calls: stream", "calls: shut down", "hung up", "answers: 400", "answers: 429", "choices",
    "requests at close()",
)  # fmt: skip


def main() -> int:
    description, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, help="default: another one each time; it is printed")
    parser.add_argument("--round", type=int, help="only this round, twice: the second time in a process that is warm")
    parser.add_argument("--kind", choices=KINDS, help="only rounds of this kind")
    parser.add_argument("--turns", type=int, help="turns or calls in each round; default: different ones")
    parser.add_argument("--keep-going", action="store_true", help="go on after a round that failed")
    parser.add_argument("--log", action="store_true", help="show the log of the package, with the traceback of every injected failure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if not options.log:
        logging.getLogger("paged_attn").setLevel(logging.CRITICAL)
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    print(f"seed {seed}, {options.minutes:g} minutes, torch {torch.__version__}", flush=True)

    soak, ends = Soak(), time.monotonic() + options.minutes * 60
    numbers = iter(range(10**9)) if options.round is None else iter([options.round] * 2)
    for number in numbers:
        plan = Plan.of(seed, number, options.kind)
        if options.turns is not None:
            plan = replace(plan, turns=options.turns)
        if not soak.run(plan) and not options.keep_going:
            break
        if time.monotonic() > ends and options.round is None:
            break
    print(soak.report())
    never = [what for what in WANTED if not soak.seen[what]]
    whole = options.kind is None and options.round is None and sum(soak.rounds.values()) >= LONG and not soak.failed
    if whole and never:
        print(f"FAILED: never seen: {', '.join(never)}; run it with another seed, or see why")
    return int(bool(soak.failed) or (whole and bool(never)))


if __name__ == "__main__":
    sys.exit(main())
