"""Rounds one after the other, each watched, and what they covered."""

from __future__ import annotations

import faulthandler
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.soak import drive_engine, drive_server, drive_threads, oracle
from tests.soak.leaks import Memory, Watch
from tests.soak.plan import Plan

DRIVERS: dict[str, Callable[[Plan], Counter[str]]] = {
    "engine": drive_engine.drive, "threads": drive_threads.drive, "server": drive_server.drive,
}  # fmt: skip
STUCK_SECONDS = 600.0  # then the stacks of all threads are printed and the process ends


@dataclass
class Soak:
    """A run: what was seen, in rounds of each kind, and the rounds that failed."""

    seen: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    failed: list[Plan] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    started: float = field(default_factory=time.monotonic)

    def run(self, plan: Plan) -> bool:
        """Run a round; False, and everything about it is printed, if it fails."""
        print(plan, flush=True)
        began = time.monotonic()
        faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True, file=sys.__stderr__)
        oracle.guides()  # makes what stays
        try:
            with Watch(warm=self.rounds[plan.kind] > 0):
                seen = DRIVERS[plan.kind](plan)
            mib = self.memory.note(plan.own_capture)
            self.memory.check()
        except Exception:  # noqa: BLE001 - whatever it is, it is reported with its seed
            self.failed.append(plan)
            traceback.print_exc(file=sys.stdout)
            print(f"FAILED: {plan}\nreplay: {plan.replay}", flush=True)
            return False
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.seen += seen
        self.rounds[plan.kind] += 1
        print(f"  {time.monotonic() - began:.1f} s, {mib:.0f} MiB: {in_words(seen)}", flush=True)
        return True

    def report(self) -> str:
        minutes = (time.monotonic() - self.started) / 60
        lines = [f"{sum(self.rounds.values())} rounds ({in_words(self.rounds)}) in {minutes:.1f} minutes; per minute:"]
        lines += [f"  {count / minutes:10.1f}  {what} ({count} in all)" for what, count in sorted(self.seen.items()) if count]
        growth = self.memory.growth
        known = f"grew by {growth:.1f} MiB" if growth is not None else "too few rounds to tell growth"
        lines.append(f"memory: {known}; by round: {' '.join(f'{mib:.0f}' for mib in self.memory.mib)}")
        lines += [f"FAILED: {plan}\nreplay: {plan.replay}" for plan in self.failed]
        return "\n".join(lines)


def in_words(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()) if count)
