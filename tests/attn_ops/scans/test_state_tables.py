"""What kernels read of a step's prompts on the device: tables that earlier steps wanted come in one copy, each as it would be alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paged_attn.attn_ops.batch import packed_ints
from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.batch.requests import StateCheckpoint
from paged_attn.attn_ops.scans.state_rows import Extends, StateRows, Wanted

READ: dict[str, Callable[[Extends], tuple[Tensor, ...]]] = {
    "rows": lambda extends: (extends.rows, extends.owners),
    "segments": lambda extends: (extends.segments_on_device, extends.ends, extends.targets),
    "states": lambda extends: (extends.slots_on_device, extends.continues, extends.starts_on_device),
    "bounds": lambda extends: extends.bounds(4),
    "larger bounds": lambda extends: extends.bounds(16),
    "taps": lambda extends: extends.taps(4, 3),
}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every copy to a device."""
    found, copy = [], packed_ints.copy_to_device

    def counted(numbers, device):
        found.append(numbers.nbytes)
        return copy(numbers, device)

    monkeypatch.setattr(packed_ints, "copy_to_device", counted)
    return found


def batch(new: tuple[int, ...] = (7, 1, 20), cached: tuple[int, ...] = (0, 5, 3), kept: tuple[int, ...] = ()) -> Batch:
    """Requests whose pages and slots are their own; `kept`: tokens of the last one after which its state is kept."""
    pages = [list(range(8 * i + 1, 8 * i + 9)) for i in range(len(new))]
    requests = [
        BatchRequest(list(range(1, count + 1)), own, before, state_slot=slot)
        for slot, (count, before, own) in enumerate(zip(new, cached, pages, strict=True), start=1)
    ]
    requests[-1] = requests[-1]._replace(checkpoints=[StateCheckpoint(end, slot) for slot, end in enumerate(kept, start=10)])
    return Batch.build(requests, 4)


def read(extends: Extends | None) -> dict[str, tuple[Tensor, ...]]:
    assert extends is not None
    return {name: each(extends) for name, each in READ.items()}


def test_tables_that_an_earlier_step_read_come_in_one_copy(copies: list[int]) -> None:
    wanted: Wanted = {}
    read(StateRows.of(batch(), wanted).extends)
    assert len(wanted) == len(READ)
    copies.clear()
    for other in (batch((30,), (0,)), batch((2, 1, 9), (4, 1, 0), (3, 5))):
        copies.clear()
        rows = StateRows.of(other, wanted)
        assert len(copies) == 1
        read(rows.extends)
        assert len(copies) == 1


@pytest.mark.parametrize("kept", [(), (1, 6, 19)])
def test_they_are_what_they_are_one_by_one(kept: tuple[int, ...]) -> None:
    wanted: Wanted = {}
    alone = read(StateRows.of(batch(kept=kept)).extends)
    read(StateRows.of(batch((5,), (0,)), wanted).extends)
    rows = StateRows.of(batch(kept=kept), wanted)
    together = read(rows.extends)
    for name in READ:
        for one, other in zip(alone[name], together[name], strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other), name
            assert not other.storage_offset() * other.itemsize % packed_ints.ALIGNMENT
    assert rows.decode_rows is not None and rows.decode_rows.tolist() == [7] and rows.decode_slots.tolist() == [2]


def test_tables_say_where_a_convolution_finds_its_tokens() -> None:
    extends = StateRows.of(batch(kept=(1, 6, 19))).extends
    assert extends is not None
    starts, rows, owners = extends.starts_on_device, extends.rows, extends.owners
    assert starts.tolist() == [0, 8] and rows.tolist() == [*range(7), *range(8, 28)] and owners.tolist() == [0] * 7 + [1] * 20
    assert extends.ends.tolist() == [7, 9, 14, 27, 28] and extends.targets.tolist() == [1, 10, 11, 12, 3]
    assert extends.continues.tolist() == [False, True] and extends.segments_on_device.tolist() == [[0, 1], [1, 4]]


def test_other_tables_of_prompts_come_in_one_copy_each(copies: list[int]) -> None:
    extends = StateRows.of(batch(kept=(1, 6))).extends
    assert extends is not None
    for table in (lambda: extends.chunks(4), lambda: extends.waves):
        copies.clear()
        table()
        assert len(copies) == 1
