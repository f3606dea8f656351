"""A step that was launched, and whose tokens the host does not have yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paged_attn.attn_ops.batch_requests import RequestColumns
from paged_attn.engine.chosen import Chosen, SampledToken
from paged_attn.engine.request import Request
from paged_attn.engine.step_plan import Scheduled
from paged_attn.engine.token_feed import place


class Parts(NamedTuple):
    """Of each request of a step the tokens from `starts` to `ends` are computed; where it `samples`, the next one is chosen.

    Columns, as in `RequestColumns`: an object for each request would take longer to make than all that is done with it.
    """

    requests: list[Request]
    starts: list[int]
    ends: list[int]
    samples: list[bool]


def lay_out(scheduled: Sequence[Scheduled]) -> tuple[Parts, RequestColumns]:
    """What each request's share of a step is, and what the batch is made of."""
    requests = [each.request for each in scheduled]
    samples = [each.samples for each in scheduled]
    starts = [request.num_cached for request in requests]
    ends = [request.num_cached + each.count for request, each in zip(requests, scheduled, strict=True)]
    tokens = [request.tokens[start:end] for request, start, end in zip(requests, starts, ends, strict=True)]
    for request, new, end in zip(requests, tokens, ends, strict=True):
        if len(request.tokens) < end:
            new.append(place(request.feed_row))
    pages, slots = [request.pages for request in requests], [request.state_slot for request in requests]
    return Parts(requests, starts, ends, samples), RequestColumns(tokens, pages, starts, list(map(int, samples)), slots)


class Flight:
    """A step that runs. Its requests count it as done from now on.

    Args:
        chosen: a row for each part that samples, in order; None if none does.
    """

    def __init__(self, parts: Parts, chosen: Chosen | None) -> None:
        self.chosen = chosen
        self.parts = parts
        self.requests = parts.requests
        self._num_landed = 0
        self._tokens: list[SampledToken | None] | None = None
        row = 0
        for request, end, samples in zip(parts.requests, parts.ends, parts.samples, strict=True):
            request.num_cached = end
            if samples:
                request.num_pending += 1
                request.feed_row = row
                row += 1

    def wait(self) -> None:
        """Until the tokens are there."""
        if self._tokens is None:
            chosen = iter(self.chosen.wait() if self.chosen is not None else ())
            self._tokens = [next(chosen) if samples else None for samples in self.parts.samples]

    def land(self) -> Iterator[tuple[Request, int, SampledToken | None]]:
        """Each request that samples, up to where it was computed, and its token (None: logits were not finite), once. What an exception of
        the caller leaves over comes at the next call."""
        self.wait()
        assert self._tokens is not None
        for index in range(self._num_landed, len(self.requests)):
            self._num_landed = index + 1
            if self.parts.samples[index]:
                request = self.requests[index]
                request.num_pending -= 1
                yield request, self.parts.ends[index], self._tokens[index]

    def undo(self) -> list[Request]:
        """The step did not happen, nor did any after it; the requests that it was for."""
        requests = []
        for index in range(len(self.requests) - 1, self._num_landed - 1, -1):
            request = self.requests[index]
            if self.parts.samples[index]:
                request.num_pending -= 1
                request.sampling.num_chosen -= 1
            if request.finish_reason is None:
                request.num_cached = min(request.num_cached, self.parts.starts[index])
                requests.append(request)
        self._num_landed = len(self.requests)
        return requests
