"""A step that was launched, and whose tokens the host does not have yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from paged_attn.attn_ops.batch import BatchRequest
from paged_attn.engine.chosen import Chosen, SampledToken
from paged_attn.engine.request import Request
from paged_attn.engine.step_plan import Scheduled
from paged_attn.engine.token_feed import place


class Part(NamedTuple):
    """One request's share: tokens start to end of it are computed; `samples`: the next one is chosen."""

    request: Request
    start: int
    end: int
    samples: bool


def lay_out(scheduled: Iterable[Scheduled]) -> tuple[list[Part], list[BatchRequest]]:
    """What each request's share of a step is, and what the batch is made of. Called for every request of every step: no frills."""
    parts, shares = [], []
    for each in scheduled:
        request, count, samples = each.request, each.count, each.samples
        tokens, start = request.tokens, request.num_cached
        if count > 1:
            new: Sequence[int] = tokens[start : start + count]
            if len(new) < count:
                new = [*new, place(request.feed_row)]
        else:
            new = (tokens[start] if start < len(tokens) else place(request.feed_row),)
        parts.append(Part(request, start, start + count, samples))
        shares.append(BatchRequest(new, request.pages, start, int(samples), request.state_slot))
    return parts, shares


class Flight:
    """A step that runs. Its requests count it as done from now on.

    Args:
        chosen: a row for each part that samples, in order; None if none does.
    """

    def __init__(self, parts: Iterable[Part], chosen: Chosen | None) -> None:
        self.chosen = chosen
        self.parts = deque(parts)
        self.requests = tuple(part.request for part in self.parts)
        self._tokens: deque[SampledToken | None] | None = None
        row = 0
        for request, _, end, samples in self.parts:
            request.num_cached = end
            if samples:
                request.num_pending += 1
                request.feed_row = row
                row += 1

    def wait(self) -> None:
        """Until the tokens are there."""
        if self._tokens is None:
            self._tokens = deque(self.chosen.wait() if self.chosen is not None else ())

    def land(self) -> Iterator[tuple[Part, SampledToken | None]]:
        """Each part with its token (None: it samples none, or logits were not finite), once. What an exception of the caller leaves over
        comes at the next call."""
        self.wait()
        assert self._tokens is not None
        while self.parts:
            part = self.parts.popleft()
            token = None
            if part.samples:
                token = self._tokens.popleft()
                part.request.num_pending -= 1
            yield part, token

    def undo(self) -> list[Request]:
        """The step did not happen, nor did any after it; the requests that it was for."""
        requests = []
        while self.parts:
            request, start, _, samples = self.parts.pop()
            if samples:
                request.num_pending -= 1
                request.sampling.num_chosen -= 1
            if request.finish_reason is None:
                request.num_cached = min(request.num_cached, start)
                requests.append(request)
        return requests
