"""Jobs of which nothing runs yet: who has waited for too long, and who makes room when the queue is full."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping

from paged_attn.asynchronous.errors import QueueFullError, QueueTimeoutError
from paged_attn.asynchronous.job import Job
from paged_attn.engine.requests.request import Request


def fair_share(limit: int, waiting_of: Mapping[Hashable, int], tenant: Hashable) -> int:
    """How many requests of a tenant may wait in a full queue: all tenants that have some in it, this one included, share it equally."""
    return limit // len({*waiting_of, tenant})


class WaitingJobs:
    """In the order in which they came. Whoever has begun is left out when it is met.

    Args:
        is_new: whether a request waits and has not run yet.
    """

    def __init__(self, is_new: Callable[[Request], bool]) -> None:
        self._is_new = is_new
        self._jobs: dict[Job, None] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        self._jobs[job] = None

    def discard(self, job: Job) -> None:
        self._jobs.pop(job, None)

    def overdue(self, now: float, seconds: float) -> Iterator[Job]:
        """Remove those that have waited for longer."""
        while self._jobs:
            job = next(iter(self._jobs))
            if self._waits(job) and now - job.arrived <= seconds:
                return
            del self._jobs[job]
            if self._waits(job):
                yield job

    def surplus(self, excess: int, limit: int, waiting_of: Mapping[Hashable, int]) -> Iterator[Job]:
        """Remove the newest jobs of those tenants that have the most, until `excess` fewer requests wait or none has more than a share."""
        waiting = dict(waiting_of)
        share = limit // max(len(waiting), 1)
        while excess > 0 and waiting:
            most = max(waiting, key=waiting.__getitem__)
            job = next((job for job in reversed(self._jobs) if job.tenant == most and self._waits(job)), None)
            if job is None or waiting[most] <= share:
                return
            del self._jobs[job]
            waiting[most] -= job.size
            excess -= job.size
            yield job

    def _waits(self, job: Job) -> bool:
        return all(map(self._is_new, job.requests))


def made_room() -> QueueFullError:
    what = "the queue is full, and this key has more requests in it than others"
    return QueueFullError(f"{what}: this one, its newest, made room; try again later")


def waited_too_long(seconds: float) -> QueueTimeoutError:
    return QueueTimeoutError(f"the request has waited for {seconds:g} s, the most that it may, and did not begin; try again later")
