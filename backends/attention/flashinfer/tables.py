"""A step's page tables as FlashInfer's plans take them: lengths and offsets on the host (pinned), page ids on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, ForwardMode
from paged_attn.attn_ops.batch.packed_ints import copy_to_device

SPLIT_REQUESTS = 4  # a mixed batch with fewer adjacent decoding requests runs as one part


@dataclass(frozen=True, slots=True)
class Part:
    """Requests [first, last) of a batch, and their rows [row, end), which one kernel serves.

    `decode`: each has one new token. `fresh`: none has anything cached, so the step's own K and V are complete.
    """

    first: int
    last: int
    row: int
    end: int
    decode: bool
    fresh: bool


def parts_of(batch: Batch) -> tuple[Part, ...]:
    """One part, or two for a mixed batch that starts or ends with at least SPLIT_REQUESTS requests with one new token."""
    new, count = batch.query_lens_host, batch.num_requests
    if count == 0:
        return ()
    if batch.mode is ForwardMode.DECODE:
        return (Part(0, count, 0, count, True, False),)
    if batch.mode is ForwardMode.MIXED:
        head = next((r for r in range(count) if new[r] > 1), count)
        tail = next((r for r in range(count) if new[count - 1 - r] > 1), count)
        if head >= max(tail, SPLIT_REQUESTS):
            return tuple(p for p in (Part(0, head, 0, head, True, False), _extending(batch, head, count, head)) if p.last > p.first)
        if tail >= SPLIT_REQUESTS:
            cut, row = count - tail, batch.num_tokens - tail
            return _extending(batch, 0, cut, 0), Part(cut, count, row, batch.num_tokens, True, False)
    return (_extending(batch, 0, count, 0),)


def _extending(batch: Batch, first: int, last: int, row: int) -> Part:
    new = batch.query_lens_host[first:last]
    return Part(first, last, row, row + sum(new), False, new == batch.seq_lens_host[first:last])


class HostLens(Tensor):
    """int32 [R] on the host, for which Python's `max` looks only at the largest element: FlashInfer's plan calls it, at 2 us an element."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.max(),))


@dataclass(frozen=True, slots=True)
class Tables:
    """Pages of some requests, int32: qo_indptr, kv_indptr [R + 1], last_page_len, seq_lens [R] on the host; kv_indices [N] on device."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    last_page_len: Tensor
    seq_lens: Tensor
    kv_indices: Tensor
    longest_query: int


def tables_of(batch: Batch, part: Part, skip: int = 0, requests: int | None = None) -> Tables:
    """The tables of a part without the first `skip` pages of each request, which must leave at least one token.

    `requests`: pad a decoding part to this many; the extra ones have one token, in the reserved page 0.
    """
    real = part.last - part.first
    count = requests or real
    device, page_size = batch.page_table.device, batch.page_size
    packed = torch.empty(4 * count + 2, dtype=torch.int32, pin_memory=device.type == "cuda")
    qo_indptr, kv_indptr, last_page_len, seq_lens = packed.split([count + 1, count + 1, count, count])
    qo, kv, last, seq = qo_indptr.numpy(), kv_indptr.numpy(), last_page_len.numpy(), seq_lens.numpy()
    seq[:real] = batch.seq_lens_host[part.first : part.last]
    seq[:real] -= skip * page_size
    seq[real:] = 1
    pages = (seq + (page_size - 1)) // page_size
    kv[0] = 0
    np.cumsum(pages, out=kv[1:])
    np.subtract(seq, (pages - 1) * page_size, out=last)
    longest = 1
    if part.decode:
        qo[:] = np.arange(count + 1)
    else:
        qo[0] = 0
        np.cumsum(batch.query_lens_host[part.first : part.last], out=qo[1:])
        longest = max(batch.query_lens_host[part.first : part.last])
    indices = _page_ids(batch.page_table[part.first : part.last, skip:], pages[:real])
    if count > real:
        indices = torch.cat([indices, indices.new_zeros(count - real)])
    return Tables(qo_indptr, kv_indptr, last_page_len, seq_lens.as_subclass(HostLens), indices, longest)


def prefix_tables(batch: Batch, part: Part, shared: int) -> Tables:
    """The first `shared` pages, common to all requests of a decoding part, as one request with all their queries."""
    count = part.last - part.first
    packed = torch.tensor(
        [0, count, 0, shared, batch.page_size, shared * batch.page_size],
        dtype=torch.int32,
        pin_memory=batch.page_table.device.type == "cuda",
    )
    qo_indptr, kv_indptr, last_page_len, seq_lens = packed.split([2, 2, 1, 1])
    return Tables(qo_indptr, kv_indptr, last_page_len, seq_lens, batch.page_table[part.first, :shared], count)


def shared_pages(batch: Batch, part: Part) -> int:
    """How many full pages, from the start, all requests of a decoding part share; 0 if the batch has no host table."""
    table = batch.page_table_host
    if table is None or part.last - part.first < 2:
        return 0
    rows = table[part.first : part.last]
    limit = (min(batch.seq_lens_host[part.first : part.last]) - 1) // batch.page_size
    if limit == 0 or not (rows[:, 0] == rows[0, 0]).all():
        return 0
    same = (rows[:, :limit] == rows[0, :limit]).all(axis=0)
    return limit if same.all() else int(same.argmin())


def _page_ids(page_table: Tensor, pages: NDArray[np.int32]) -> Tensor:
    """The first `pages[r]` entries of each row [R, width], concatenated. The host knows the sizes, so nothing waits for the device."""
    longest = int(pages.max())
    if longest == int(pages.min()):
        return page_table[:, :longest].contiguous().view(-1)  # reshape could return a view with gaps
    device, total = page_table.device, int(pages.sum())
    moved = page_table.stride(0) * np.arange(len(pages)) - (np.cumsum(pages) - pages)  # index in the table, minus index in the result
    counts, shifts = copy_to_device(np.stack([pages, moved]), device)
    sources = torch.repeat_interleave(shifts, counts, output_size=total)
    sources += torch.arange(total, device=device)
    flat = page_table.as_strided((page_table.stride(0) * (len(pages) - 1) + longest,), (1,))
    return flat[sources]
