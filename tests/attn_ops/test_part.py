"""Some requests of a batch as a batch of their own."""

from __future__ import annotations

import itertools

import pytest
import torch

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest, ForwardMode
from paged_attn.attn_ops.batch.part import part_of

PAGE_SIZE = 4
LENGTHS = ((0, 5), (7, 1), (3, 4), (0, 1), (2, 9), (11, 1))  # cached, new


def batch() -> Batch:
    pages = itertools.count(1)
    requests = []
    for index, (cached, new) in enumerate(LENGTHS):
        own = [next(pages) for _ in range(-(-(cached + new) // PAGE_SIZE))]
        requests.append(BatchRequest([10 * index + token for token in range(new)], own, cached))
    return Batch.build(requests, PAGE_SIZE)


@pytest.mark.parametrize("count", range(1, len(LENGTHS) + 1))
def test_every_choice_of_requests_keeps_their_rows(count: int) -> None:
    whole = batch()
    starts = [0, *itertools.accumulate(new for _, new in LENGTHS)]
    for chosen in itertools.combinations(range(len(LENGTHS)), count):
        part, at = part_of(whole, chosen)
        rows = [row for r in chosen for row in range(starts[r], starts[r + 1])]
        assert at.tolist() == rows
        assert part.input_ids.tolist() == whole.input_ids[rows].tolist() and part.slots.tolist() == whole.slots[rows].tolist()
        assert part.seq_lens.tolist() == list(part.seq_lens_host) == [sum(LENGTHS[r]) for r in chosen]
        assert part.query_lens.tolist() == list(part.query_lens_host) == [LENGTHS[r][1] for r in chosen]
        assert part.query_start.tolist() == [0, *itertools.accumulate(part.query_lens_host)]
        assert torch.equal(part.page_table, whole.page_table[list(chosen)])
        for tensor in (part.seq_lens, part.query_lens, part.query_start):
            assert tensor.data_ptr() % 16 == 0  # or kernels are compiled once more


def test_its_mode_is_its_own() -> None:
    assert part_of(batch(), [1, 5])[0].mode is ForwardMode.DECODE
    assert part_of(batch(), [0, 1])[0].mode is ForwardMode.MIXED
    assert part_of(batch(), [0, 4])[0].mode is ForwardMode.EXTEND
