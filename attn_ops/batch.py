"""What one step runs: a ragged batch laid out as one row of tokens."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.packed_ints import PackedInts, write_joined, write_table

MIN_ROWS = 2  # torch specialises sizes 0 and 1, so a smaller step is padded to two rows


class ForwardMode(enum.Enum):
    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"
    IDLE = "idle"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"


class BatchRequest(NamedTuple):
    """One request's share of a step. (A named tuple: hundreds are made in every step.)

    Attributes:
        tokens: the new token ids, at least one; any sequence of integers, numpy arrays included.
        pages: pages that hold its KV in order (likewise, and int32 arrays are fastest), enough for `num_cached + len(tokens)` tokens.
        num_cached: tokens whose KV is in the pages already.
        num_logits: how many of the last tokens want logits (0 for a chunk that is not the prompt's last).
        state_slot: of its recurrent state, for models that have one.
    """

    tokens: Sequence[int]
    pages: Sequence[int]
    num_cached: int = 0
    num_logits: int = 1
    state_slot: int = 0


@dataclass(frozen=True)
class Batch:
    """R requests in one row of T tokens; rows at and past `num_tokens` are padding.

    Device tensors: input_ids, positions, slots [T] int64; page_table [R, max_pages] int32; seq_lens (tokens in cache after
    this step), query_lens (new tokens) [R] int32; query_start [R + 1] int32 (exclusive prefix sum of query_lens);
    logits_rows [N] int64, the rows whose logits are wanted, of which the first `num_logits` are real.
    A slot is `page * page_size + offset`; padding writes to slot 0, in the reserved page 0.
    page_table_host mirrors page_table, where the batch was built here; do not write to it.
    """

    mode: ForwardMode
    page_size: int
    num_tokens: int
    num_logits: int
    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    page_table: Tensor
    seq_lens: Tensor
    query_lens: Tensor
    query_start: Tensor
    logits_rows: Tensor
    seq_lens_host: tuple[int, ...]
    query_lens_host: tuple[int, ...]
    state_slots_host: tuple[int, ...] = ()
    page_table_host: NDArray[np.int32] | None = None

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens_host)

    @property
    def num_rows(self) -> int:
        """T, padding included."""
        return self.input_ids.shape[0]

    @classmethod
    def build(cls, requests: Sequence[BatchRequest], page_size: int, device: torch.device | str = "cpu") -> Batch:
        """Lay the requests out in order. A GPU gets all of it in one copy, which nothing waits for.

        Raises:
            ValueError: a request without tokens, with too few pages, with page 0, with a negative `num_cached`, or that wants more
                logits than it has tokens; tokens or pages that are not integers.
        """
        all_tokens, all_pages, all_cached, all_logits, state_slots = zip(*requests, strict=True) if requests else ((),) * 5
        query_lens, num_pages = tuple(map(len, all_tokens)), tuple(map(len, all_pages))
        num_requests, num_tokens, num_logits = len(query_lens), sum(query_lens), sum(all_logits)
        cached, logits, new, counts = _int64(all_cached, all_logits, query_lens, num_pages)
        seq_lens = cached + new
        need = -(-seq_lens // page_size)  # pages
        if ((cached | (new - 1) | (counts - need) | logits | (new - logits)) < 0).any():
            _refuse(requests, page_size)

        width = max(num_pages, default=1)
        wide = (max(MIN_ROWS, num_tokens),) * 3 + (max(MIN_ROWS, num_logits),)
        packed = PackedInts(wide, (num_requests * width, num_requests, num_requests, num_requests + 1), device)
        ids, positions, slots, logits_rows, table, seq_lens_out, query_lens_out, query_start = packed.host
        write_joined(ids[:num_tokens], all_tokens, "tokens")
        write_table(table := table.reshape(num_requests, width), all_pages, "pages")
        if np.count_nonzero(table > 0) < sum(num_pages) and ((table < 1) & (np.arange(width) < need[:, None])).any():
            _refuse(requests, page_size)

        ends, owner = np.add.accumulate(new), np.arange(num_requests)
        if num_tokens != num_requests:
            owner = owner.repeat(new)
            position = np.arange(num_tokens) + (seq_lens - ends)[owner]
        else:
            position = cached
        page, offset = np.divmod(position, page_size)
        positions[:num_tokens] = position
        slots[:num_tokens] = table[owner, page].astype(np.int64) * page_size + offset
        if num_logits:
            last = np.arange(num_logits) + (ends - np.add.accumulate(logits)).repeat(logits)
            logits_rows[:num_logits] = last
            logits_rows[num_logits:] = last[-1]
        seq_lens_out[:], query_lens_out[:], query_start[1:] = seq_lens, new, ends
        input_ids, position_ids, slot_ids, rows, page_table, *lengths = packed.to_device()
        return cls(
            mode=_mode(cached, new),
            page_size=page_size,
            num_tokens=num_tokens,
            num_logits=num_logits,
            input_ids=input_ids,
            positions=position_ids,
            slots=slot_ids,
            page_table=page_table.view(num_requests, width),
            seq_lens=lengths[0],
            query_lens=lengths[1],
            query_start=lengths[2],
            logits_rows=rows,
            seq_lens_host=tuple(seq_lens.tolist()),
            query_lens_host=query_lens,
            state_slots_host=state_slots,
            page_table_host=table,
        )

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments for the compiled model: `compiled(**batch.model_inputs())`.

        input_ids and position_ids are [1, T] with T marked dynamic, so that every length shares one compile.
        """
        from torch._dynamo import mark_dynamic

        # Copies: of a view into a larger buffer Dynamo makes the offset a symbol, too.
        inputs = {"input_ids": self.input_ids.clone()[None], "position_ids": self.positions.clone()[None]}
        for tensor in inputs.values():
            mark_dynamic(tensor, 1)
        return {**inputs, "use_cache": False}


def _mode(cached: NDArray[np.int64], new: NDArray[np.int64]) -> ForwardMode:
    decoding = int(np.count_nonzero((new == 1) & (cached > 0)))
    if not decoding:
        return ForwardMode.EXTEND if new.size else ForwardMode.IDLE
    return ForwardMode.DECODE if decoding == new.size else ForwardMode.MIXED


def _int64(*rows: Sequence[int]) -> NDArray[np.int64]:
    """[rows, requests]; by struct, which refuses what is no integer and takes a third of numpy's time."""
    try:
        packed = struct.pack(f"{len(rows) * len(rows[0])}q", *chain.from_iterable(rows))
    except struct.error:
        raise ValueError(f"num_cached and num_logits must be integers; got {rows[0]} and {rows[1]}") from None
    return np.frombuffer(packed, np.int64).reshape(len(rows), -1)


def _refuse(requests: Sequence[BatchRequest], page_size: int) -> NoReturn:
    for index, request in enumerate(requests):
        _check(index, request, page_size)
    raise AssertionError("a batch was refused whose requests are all right")


def _check(index: int, request: BatchRequest, page_size: int) -> None:
    count = len(request.tokens)
    if request.num_cached < 0:
        raise ValueError(f"request {index} has num_cached={request.num_cached}; allowed are 0 and above")
    need = -(-(request.num_cached + count) // page_size)
    if count < 1:
        raise ValueError(f"request {index} of the batch has no new token; leave it out of this step")
    if len(request.pages) < need:
        raise UnsupportedError(
            f"request {index} has {len(request.pages)} pages of {page_size} tokens, but {request.num_cached} cached + "
            f"{count} new tokens need {need}; allocate {need - len(request.pages)} more"
        )
    if (lowest := min(request.pages[:need])) < 1:
        raise ValueError(f"request {index} lists page {lowest}; page 0 is reserved for padding, so take pages from a PageAllocator")
    if not 0 <= request.num_logits <= count:
        raise ValueError(f"request {index} wants {request.num_logits} logits of {count} new tokens; allowed are 0 to {count}")
