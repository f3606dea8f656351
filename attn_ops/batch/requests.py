"""The requests of a step, one by one or column by column."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged_attn.attn_ops.batch.packed_ints import write_joined, write_table


class StateCheckpoint(NamedTuple):
    """A state to keep: also copy the state after this many of a request's new tokens (at least 1, not all) to this slot."""

    tokens: int
    slot: int


class BatchRequest(NamedTuple):
    """One request's share of a step.

    Attributes:
        tokens: the new token ids, at least one; any sequence of integers, including numpy arrays.
        pages: pages that hold its KV in order (any sequence; `array("i")` is fastest), enough for `num_cached + len(tokens)` tokens.
        num_cached: tokens whose KV is already in the pages.
        num_logits: how many of the last tokens want logits (0 for a chunk that is not the prompt's last).
        state_slot: the slot of its recurrent state, for models that have one.
        checkpoints: states to keep partway through its tokens, ascending.
        length: tokens that the request has in total, including those of later steps; 0: none come later. Matters to models whose rotary
            embedding depends on the length of the call (longrope).
    """

    tokens: Sequence[int]
    pages: Sequence[int]
    num_cached: int = 0
    num_logits: int = 1
    state_slot: int = 0
    checkpoints: Sequence[StateCheckpoint] = ()
    length: int = 0


@dataclass(slots=True, eq=False)
class RequestColumns:
    """R BatchRequests as arrays, from which batches are built; with hundreds of requests, keep them in this form.

    Args:
        tokens: [sum(num_new)] int64, one request after another.
        page_table: [R, width] int32, zeros past the `num_pages` of a row.
        num_pages, num_cached, num_new, num_logits, state_slots: [R] int64.
        lora_slots: [R] int64, each request's adapter or -1; None if none has any.
        lengths: [R] int64, each request's tokens in total, including those of later steps; None: none come later.
        checkpoints: by index, for requests that have any.
        group_tables: [groups - 1, R, width] int32, the page tables of the groups of layers after the first; None without groups. With
            groups, `page_table` and these have 0 for freed pages, whose tokens no query of the step sees.
    """

    tokens: NDArray[np.int64]
    page_table: NDArray[np.int32]
    num_pages: NDArray[np.int64]
    num_cached: NDArray[np.int64]
    num_new: NDArray[np.int64]
    num_logits: NDArray[np.int64]
    state_slots: NDArray[np.int64]
    lora_slots: NDArray[np.int64] | None = None
    checkpoints: Mapping[int, Sequence[StateCheckpoint]] | None = None
    group_tables: NDArray[np.int32] | None = None
    lengths: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, requests: Sequence[BatchRequest] | RequestColumns) -> RequestColumns:
        """Returns `requests` itself if it is a RequestColumns already.

        Raises:
            TypeError: something is not a BatchRequest, or its tokens or pages are not sequences.
            ValueError: something is not an integer or does not fit.
        """
        if isinstance(requests, RequestColumns):
            return requests
        try:
            tokens, pages, cached, logits, slots, kept, lengths = zip(*requests, strict=True) if requests else ((),) * 7
            num_new, num_pages = list(map(len, tokens)), list(map(len, pages))
        except (TypeError, ValueError):
            _refuse_non_requests(requests)
            raise
        num_cached, num_logits, state_slots, length, new, counts = _integers(cached, logits, slots, lengths, num_new, num_pages)
        joined, table = np.empty(sum(num_new), np.int64), np.empty((len(pages), max(num_pages, default=1)), np.int32)
        write_joined(joined, tokens, "tokens")
        write_table(table, pages, "pages")
        checkpoints = {index: each for index, each in enumerate(kept) if each}
        total = np.where(length != 0, length, num_cached + new)
        return cls(joined, table, counts, num_cached, new, num_logits, state_slots, checkpoints=checkpoints, lengths=total)

    @property
    def all_decode(self) -> bool:
        """Whether each request has one new token after cached ones, and wants its logits."""
        return bool(len(self) and ((self.num_new == 1) & (self.num_logits == 1) & (self.num_cached > 0)).all())

    def __len__(self) -> int:
        return len(self.num_new)

    def rows(self) -> list[BatchRequest]:
        """The requests one by one: for messages, and for tests."""
        ends = self.num_new.cumsum().tolist()
        starts, numbers = [0, *ends], zip(self.num_cached.tolist(), self.num_logits.tolist(), self.state_slots.tolist(), strict=True)
        return [
            BatchRequest(
                self.tokens[start:end].tolist(),
                table[:pages].tolist(),
                *others,
                (self.checkpoints or {}).get(index, ()),
                0 if self.lengths is None else self.lengths.item(index),
            )
            for index, (start, end, table, pages, others) in enumerate(
                zip(starts, ends, self.page_table, self.num_pages.tolist(), numbers, strict=False)
            )
        ]


def _integers(*rows: Sequence[Any]) -> NDArray[np.int64]:
    """[rows, requests]; packed by struct, which refuses anything but integers and takes a third of numpy's time."""
    try:
        packed = struct.pack(f"{len(rows) * len(rows[0])}q", *chain.from_iterable(rows))
    except struct.error:
        names = "num_cached, num_logits, state_slot and length"
        raise ValueError(f"{names} must be integers; got {rows[0]}, {rows[1]}, {rows[2]} and {rows[3]}") from None
    return np.frombuffer(packed, np.int64).reshape(len(rows), -1)


def _refuse_non_requests(requests: Any) -> None:
    """Raises TypeError for the first that is not a BatchRequest; called once converting the requests has failed."""
    if isinstance(requests, BatchRequest) or not isinstance(requests, Sequence):
        raise TypeError(f"the requests of a batch are a {type(requests).__name__}; allowed: a list of BatchRequest(tokens, pages, ...)")
    for index, request in enumerate(requests):
        if not isinstance(request, BatchRequest):
            raise TypeError(f"request {index} of the batch is a {type(request).__name__}; allowed: BatchRequest(tokens, pages, ...)")
        for name in ("tokens", "pages"):
            if not hasattr(getattr(request, name), "__len__"):
                got = type(getattr(request, name)).__name__
                raise TypeError(f"request {index} of the batch has {name} that are a {got}; allowed: a sequence of integers")
