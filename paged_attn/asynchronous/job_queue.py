"""Jobs that have not started to run: how many may wait, for how long, and which one is dropped to make room."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

from paged_attn.asynchronous.errors import PromptError, QueueFullError, QueueTimeoutError
from paged_attn.asynchronous.job import Job
from paged_attn.asynchronous.snapshot import EngineSnapshot
from paged_attn.engine.requests.request import Request


class JobQueue:
    """In the order in which they came. Whoever calls holds the condition of the engine's thread.

    Args:
        max_queue: prompts that may wait beyond those that can run. When so many do, tenants share the queue equally.

    Attributes:
        blocked: the engine's last step left some requests waiting, and they still are, so a new one has to wait too.
    """

    def __init__(self, max_queue: int) -> None:
        self.max_queue = max_queue
        self.blocked = False
        self._jobs: deque[Job] = deque()
        self._unseen: Counter[Hashable] = Counter()  # prompts of each tenant that no snapshot of the engine has counted yet
        self._beyond = 0  # prompts that were let into a full queue, for which others are to make room

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def num_unseen(self) -> int:
        return self._unseen.total()

    def add(self, job: Job, max_requests: int, engine: EngineSnapshot) -> None:
        """Let it wait for its turn; `engine`: what it said of its queue last. Raises QueueFullError: too many wait; PromptError: so many
        prompts can never wait."""
        count = job.size
        if count > max_requests + self.max_queue:
            raise too_many_prompts(count, max_requests, self.max_queue)
        waiting = engine.waiting + self.num_unseen
        beyond = self._too_many(waiting + count, engine.running, max_requests)
        if beyond > 0:
            waiting_of = Counter(engine.waiting_of) + self._unseen
            if waiting_of[job.tenant] + count > fair_share(self.max_queue, waiting_of, job.tenant):
                state = (
                    f"{engine.running} requests run and {waiting} wait; at most {self.max_queue} may wait beyond {max_requests} that run"
                )
                raise QueueFullError(f"the queue is full: {state}; try again later")
            self._beyond += min(count, beyond)
        self._jobs.append(job)
        self._unseen[job.tenant] += count

    def take(self, count: int | None = None) -> list[Job]:
        """The first ones; None: all."""
        return [self._jobs.popleft() for _ in range(len(self._jobs) if count is None else min(len(self._jobs), count))]

    def were_seen(self, jobs: Iterable[Job]) -> None:
        """The engine's snapshot counts them from now on."""
        for job in jobs:
            self._unseen[job.tenant] -= job.size
        self._unseen = +self._unseen  # forget tenants whose count is 0

    def take_excess(self, running: int, waiting: int, max_requests: int) -> int:
        """How many prompts have to make room for those that were let into a full queue since the last call. `running`, `waiting`: requests
        of the engine now; some may have left since those came."""
        beyond, self._beyond = self._beyond, 0
        if beyond == 0:
            return 0
        return max(min(beyond, self._too_many(waiting + sum(job.size for job in self._jobs), running, max_requests)), 0)

    def _too_many(self, waiting: int, running: int, max_requests: int) -> int:
        """By how many those that wait are more than the queue has room for, beside those that begin next."""
        begin_next = 0 if self.blocked else max(max_requests - running, 0)
        return waiting - self.max_queue - begin_next

    def clear(self) -> list[Job]:
        """Empty it; what was in it."""
        self._unseen.clear()
        return self.take()


def too_many_prompts(count: int, max_requests: int, max_queue: int, param: str = "prompt") -> PromptError:
    limit = f"{max_requests + max_queue}: {max_requests} that run and {max_queue} that wait"
    return PromptError(f"{count} prompts in one request; this server takes at most {limit}", param)


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
