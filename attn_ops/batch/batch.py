"""What one step runs: a ragged batch laid out as one row of tokens."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_attn.attn_ops.batch.packed_ints import PackedInts
from paged_attn.attn_ops.batch.requests import BatchRequest, RequestColumns, StateCheckpoint
from paged_attn.attn_ops.batch.step_buffers import StepBuffers, StepFields, StepShape
from paged_attn.attn_ops.errors import UnsupportedError

__all__ = ["Batch", "BatchRequest", "ForwardMode", "RequestColumns", "StateCheckpoint"]


class ForwardMode(enum.Enum):
    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"
    IDLE = "idle"


class GroupTable(NamedTuple):
    """A layer group's view of the step's tokens: slots [T] int64, page_table [R, max_pages] int32 and its copy on the host."""

    slots: Tensor
    page_table: Tensor
    page_table_host: NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """R requests in one row of T tokens; rows from `num_tokens` on are padding.

    Device tensors: input_ids, positions, slots [T] int64; page_table [R, max_pages] int32; seq_lens (tokens in the cache after
    this step), query_lens (new tokens), state_slots (0: none), request_lens (all tokens, including those of later steps) [R] int32;
    query_start [R + 1] int32 (exclusive prefix sum of query_lens);
    logits_rows [N] int64, the rows whose logits are wanted; the first `num_logits` are real, the rest padding.
    A slot is `page * page_size + offset`; padding writes to slot 0, in the reserved page 0.
    page_table_host mirrors the columns of page_table that this step fills, if the batch was built by `build`; do not write to it.
    lora_slots [T] and lora_logits_slots [N] int32: the adapter of each row and of each logits row, or -1; only if the graph has adapters.
    checkpoints: by request index, the recurrent states to keep partway through the step.
    groups: for a pool with groups of layers, each group's slots and tables; the first group's are also the batch's own. A table has 0 where
    a page was freed because no query of the step sees its tokens.
    knows_tokens: placeholders in input_ids were replaced by tokens on their way to the device (`StepFetch`).
    The last `num_dummies` requests are padding: token 0 at position 0 in slot 0, seq_len 1; `num_tokens` and `num_logits` count them.
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
    state_slots: Tensor
    request_lens: Tensor
    seq_lens_host: tuple[int, ...]
    query_lens_host: tuple[int, ...]
    state_slots_host: tuple[int, ...] = ()
    page_table_host: NDArray[np.int32] | None = None
    num_dummies: int = 0
    lora_slots: Tensor | None = None
    lora_logits_slots: Tensor | None = None
    checkpoints: Mapping[int, Sequence[StateCheckpoint]] = field(default_factory=dict)
    groups: tuple[GroupTable, ...] = ()
    knows_tokens: bool = False

    def of_group(self, index: int) -> Batch:
        """The step with the slots and tables of one layer group."""
        batch = object.__new__(Batch)  # `dataclasses.replace` takes 15 us, for each group of a step
        vars(batch).update(vars(self), groups=(), **self.groups[index]._asdict())
        return batch

    @property
    def num_requests(self) -> int:
        """R, dummies included."""
        return len(self.seq_lens_host)

    @property
    def num_real_requests(self) -> int:
        return self.num_requests - self.num_dummies

    @property
    def num_rows(self) -> int:
        """T, padding included."""
        return self.input_ids.shape[0]

    @classmethod
    def build(
        cls,
        requests: Sequence[BatchRequest] | RequestColumns,
        page_size: int,
        device: torch.device | str = "cpu",
        shape: StepShape | None = None,
        buffers: StepBuffers | None = None,
    ) -> Batch:
        """Lay the requests out in order. All tensors go to a GPU in one copy or launch, for which the host does not wait.

        Args:
            device: where the tensors go; ignored with `buffers`, which have their own.
            shape: pad to this; by default to MIN_ROWS rows and logits. With `shape.requests` every request must be a decode step
                with one logit, dummies follow, and the mode is DECODE even if there are only dummies.
            buffers: memory for the tensors, at addresses that depend only on the shape; the previous batch is overwritten.
                With `shape.requests` page tables are rows of `buffers.page_tables` with all their columns.

        Raises:
            ValueError: a request has no tokens, too few pages, page 0, a negative `num_cached`, or wants more logits than it has tokens;
                tokens or pages are not integers; shape or buffers are too small; or the shape asks for decode steps and gets others.
        """
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; allowed are 1 and above, as the pool has")
        columns = RequestColumns.of(requests)
        seq_lens = columns.num_cached + columns.num_new
        shape = _checked_shape(columns, seq_lens, page_size, shape)
        num_requests, width, others = shape.requests or len(columns), columns.page_table.shape[1], columns.group_tables
        if buffers is None:
            num_groups = 1 if others is None else 1 + len(others)
            packed = PackedInts(*StepFields.sizes(shape.rows, shape.logits, num_requests, width, num_groups), device)
        else:
            num_groups, packed = buffers.num_groups, buffers.pack(shape, num_requests, width)
        host = StepFields.of(packed.host, num_groups, num_requests, width)
        _fill_tables(host.page_tables, columns, seq_lens, page_size)
        _fill_rows(host, columns, seq_lens, page_size)
        if buffers is None:
            placed = StepFields.of(packed.to_device(), num_groups, num_requests, width)
        else:
            placed = buffers.send(packed, shape, num_requests, width)
        num_dummies = num_requests - len(columns)
        return cls(
            mode=ForwardMode.DECODE if shape.requests is not None else mode_of(columns.num_cached, columns.num_new),
            page_size=page_size,
            num_tokens=len(columns.tokens) + num_dummies,
            num_logits=int(columns.num_logits.sum()) + num_dummies,
            input_ids=placed.input_ids,
            positions=placed.positions,
            slots=placed.slots[0],
            page_table=placed.page_tables[0],
            seq_lens=placed.seq_lens,
            query_lens=placed.query_lens,
            query_start=placed.query_start,
            logits_rows=placed.logits_rows,
            state_slots=placed.state_slots,
            request_lens=placed.request_lens,
            seq_lens_host=(*seq_lens.tolist(), *(1,) * num_dummies),
            query_lens_host=(*columns.num_new.tolist(), *(1,) * num_dummies),
            state_slots_host=(*columns.state_slots.tolist(), *(0,) * num_dummies),
            page_table_host=host.page_tables[0],
            num_dummies=num_dummies,
            checkpoints=columns.checkpoints or {},
            knows_tokens=buffers is not None and buffers.fetch is not None,
            groups=tuple(map(GroupTable, placed.slots, placed.page_tables, host.page_tables)) if num_groups > 1 else (),
        )

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments for the compiled model: `compiled(**batch.model_inputs())`.

        input_ids and position_ids are [1, T] with T marked dynamic, so that all lengths share one compilation.
        """
        from torch._dynamo import mark_dynamic

        # Copies, because for a view into a larger buffer Dynamo would also make the offset a symbol.
        inputs = {"input_ids": self.input_ids.clone()[None], "position_ids": self.positions.clone()[None]}
        for tensor in inputs.values():
            mark_dynamic(tensor, 1)
        return {**inputs, "use_cache": False}


def mode_of(cached: NDArray[np.int64], new: NDArray[np.int64]) -> ForwardMode:
    """The mode of a step, from each request's cached and new tokens."""
    decoding = int(np.count_nonzero((new == 1) & (cached > 0)))
    if not decoding:
        return ForwardMode.EXTEND if new.size else ForwardMode.IDLE
    return ForwardMode.DECODE if decoding == new.size else ForwardMode.MIXED


def _checked_shape(columns: RequestColumns, seq_lens: NDArray[np.int64], page_size: int, shape: StepShape | None) -> StepShape:
    """What to pad to; raises as `Batch.build` does."""
    cached, new, logits = columns.num_cached, columns.num_new, columns.num_logits
    lacking = columns.num_pages - (seq_lens + (page_size - 1)) // page_size
    later = 0 if columns.lengths is None else columns.lengths - seq_lens
    if ((cached | (new - 1) | lacking | logits | (new - logits) | later) < 0).any():
        _refuse(columns.rows(), page_size)
    num_tokens, num_logits = len(columns.tokens), int(logits.sum())
    if shape is None:
        return StepShape.smallest(num_tokens, num_logits)
    if shape.requests is not None and not (num_tokens == len(columns) == num_logits and cached.all()):
        _refuse_extensions(columns.rows(), shape)
    shape.check(num_tokens, num_logits, len(columns))
    return shape


def _fill_tables(tables: Sequence[NDArray[np.int32]], columns: RequestColumns, seq_lens: NDArray[np.int64], page_size: int) -> None:
    """Write the page table of each group, [R, width], in the rows of real requests."""
    first, num_real, others = columns.page_table, len(columns), columns.group_tables
    if others is not None and len(others) != len(tables) - 1:
        raise ValueError(f"the step has page tables of {1 + len(others)} groups of layers, but the buffers {len(tables)}")
    if others is None and len(tables) > 1 and num_real:
        raise ValueError(f"the buffers are for {len(tables)} groups of layers, and the step has one page table; give `group_tables`")
    if others is None and np.count_nonzero(first > 0) < columns.num_pages.sum():
        needed = (seq_lens + (page_size - 1)) // page_size
        if ((first < 1) & (np.arange(first.shape[1]) < needed[:, None])).any():
            _refuse(columns.rows(), page_size)
    for table, given in zip(tables, [first] if others is None else [first, *others], strict=False):
        table[:num_real] = given


def _fill_rows(host: StepFields, columns: RequestColumns, seq_lens: NDArray[np.int64], page_size: int) -> None:
    """Write all but the page tables, which are there already."""
    cached, new, logits = columns.num_cached, columns.num_new, columns.num_logits
    num_real, num_tokens, num_logits = len(columns), len(columns.tokens), int(logits.sum())
    host.input_ids[:num_tokens] = columns.tokens
    host.seq_lens[:num_real], host.query_lens[:num_real], host.state_slots[:num_real] = seq_lens, new, columns.state_slots
    host.request_lens[:num_real] = seq_lens if columns.lengths is None else columns.lengths
    if num_tokens == num_real == num_logits:  # each request has at least one token, and no more logits than tokens
        position, owner, last = cached, np.arange(num_real), np.arange(num_real)
        host.query_start[:] = np.arange(len(host.query_start))
    else:
        ends = np.add.accumulate(new)
        owner = np.arange(num_real).repeat(new)
        position = np.arange(num_tokens) + (seq_lens - ends)[owner]
        last = np.arange(num_logits) + (ends - np.add.accumulate(logits)).repeat(logits)
        host.query_start[1:] = ends
    host.positions[:num_tokens] = position
    page = position // page_size
    for slots, table in zip(host.slots, host.page_tables, strict=True):
        slots[:num_tokens] = (table[owner, page] - page) * page_size + position
    if num_logits:
        host.logits_rows[:num_logits] = last
        host.logits_rows[num_logits:] = last[-1]
    if len(host.seq_lens) > num_real:  # dummies
        host.seq_lens[num_real:] = host.query_lens[num_real:] = host.request_lens[num_real:] = 1
        host.logits_rows[:] = np.arange(len(host.seq_lens))


def _refuse(requests: Sequence[BatchRequest], page_size: int) -> NoReturn:
    """Raises ValueError for the first invalid request."""
    for index, request in enumerate(requests):
        _check(index, request, page_size)
    raise AssertionError("a batch was refused although all its requests are valid")


def _refuse_extensions(requests: Sequence[BatchRequest], shape: StepShape) -> NoReturn:
    """Raises ValueError for the first request that is not a decode step with one logit."""
    for index, request in enumerate(requests):
        if len(request.tokens) != 1 or request.num_cached < 1 or request.num_logits != 1:
            raise ValueError(
                f"request {index} has {len(request.tokens)} new tokens after {request.num_cached} cached ones and wants "
                f"{request.num_logits} logits, but {shape} takes decode steps: one new token after cached ones, and its logits; "
                "give a shape without `requests`"
            )
    raise AssertionError("a batch was refused although all its requests decode")


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
    if request.length and request.length < request.num_cached + count:
        raise ValueError(
            f"request {index} has length={request.length}; allowed are 0 and {request.num_cached + count} and above, as it has "
            f"{request.num_cached} cached and {count} new tokens in this step"
        )
    if not 0 <= request.num_logits <= count:
        raise ValueError(f"request {index} wants {request.num_logits} logits of {count} new tokens; allowed are 0 to {count}")
