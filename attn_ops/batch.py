"""What one step runs: a ragged batch laid out as one row of tokens."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError

MIN_ROWS = 2  # torch specialises sizes 0 and 1, so a smaller step is padded to two rows


class ForwardMode(enum.Enum):
    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"
    IDLE = "idle"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"


@dataclass(frozen=True)
class BatchRequest:
    """One request's share of a step.

    Attributes:
        tokens: the new token ids, at least one.
        pages: pages that hold its KV in order, enough for `num_cached + len(tokens)` tokens.
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

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens_host)

    @property
    def num_rows(self) -> int:
        """T, padding included."""
        return self.input_ids.shape[0]

    @classmethod
    def build(cls, requests: Sequence[BatchRequest], page_size: int, device: torch.device | str = "cpu") -> Batch:
        """Lay the requests out in order.

        Raises:
            ValueError: a request without tokens, with too few pages, with page 0, with a negative `num_cached`, or that wants more
                logits than it has tokens.
        """
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        for index, request in enumerate(requests):
            _check(index, request, page_size)
            start = request.num_cached
            end = start + len(request.tokens)
            ids.extend(request.tokens)
            positions.extend(range(start, end))
            slots.extend(request.pages[p // page_size] * page_size + p % page_size for p in range(start, end))
            rows.extend(range(len(ids) - request.num_logits, len(ids)))
        num_tokens, num_logits = len(ids), len(rows)
        padding = [0] * max(0, MIN_ROWS - num_tokens)
        rows += [rows[-1] if rows else 0] * max(0, MIN_ROWS - num_logits)
        query_lens = [len(r.tokens) for r in requests]
        starts = [0]
        for length in query_lens:
            starts.append(starts[-1] + length)
        width = max((len(r.pages) for r in requests), default=1)
        table = [[*r.pages, *[0] * (width - len(r.pages))] for r in requests]
        seq_lens = [r.num_cached + len(r.tokens) for r in requests]

        def on_device(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        return cls(
            mode=_mode(requests),
            page_size=page_size,
            num_tokens=num_tokens,
            num_logits=num_logits,
            input_ids=on_device(ids + padding, torch.int64),
            positions=on_device(positions + padding, torch.int64),
            slots=on_device(slots + padding, torch.int64),
            page_table=on_device(table, torch.int32).reshape(len(requests), width),
            seq_lens=on_device(seq_lens, torch.int32),
            query_lens=on_device(query_lens, torch.int32),
            query_start=on_device(starts, torch.int32),
            logits_rows=on_device(rows, torch.int64),
            seq_lens_host=tuple(seq_lens),
            query_lens_host=tuple(query_lens),
            state_slots_host=tuple(r.state_slot for r in requests),
        )

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments for the compiled model: `compiled(**batch.model_inputs())`.

        input_ids and position_ids are [1, T] with T marked dynamic, so that every length shares one compile.
        """
        from torch._dynamo import mark_dynamic

        inputs = {"input_ids": self.input_ids[None], "position_ids": self.positions[None]}
        for tensor in inputs.values():
            mark_dynamic(tensor, 1)
        return {**inputs, "use_cache": False}


def _mode(requests: Sequence[BatchRequest]) -> ForwardMode:
    if not requests:
        return ForwardMode.IDLE
    decoding = [len(r.tokens) == 1 and r.num_cached > 0 for r in requests]
    if all(decoding):
        return ForwardMode.DECODE
    return ForwardMode.MIXED if any(decoding) else ForwardMode.EXTEND


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
