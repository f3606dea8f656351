"""Integers in one buffer: what is written comes back, nothing overlaps, and what is not an integer is refused."""

import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paged_attn.attn_ops.batch.packed_ints import ALIGNMENT, IntBuffer, PackedInts, words, write_joined, write_table

SIZES = st.lists(st.integers(0, 40), max_size=4)
FORMS = {
    "list": list,
    "tuple": tuple,
    "int64": lambda row: np.array(row, dtype=np.int64),
    "int32": lambda row: np.array(row, dtype=np.int32),
    "uint64": lambda row: np.array(row, dtype=np.uint64),
    "array": lambda row: array.array("i", row),
    "tensor": lambda row: torch.tensor(row, dtype=torch.int64),
}
ROWS = [[3, 1, 2], [], [7], [2**31 - 1, 5]]


@given(SIZES, SIZES)
def test_fields_are_as_long_as_asked_aligned_and_apart(int64, int32):
    packed = PackedInts(int64, int32)
    for number, field in enumerate(packed.host, start=1):
        assert not field.any()
        field[:] = number
    fields = packed.to_device()
    assert [len(f) for f in fields] == [*int64, *int32]
    assert [f.dtype for f in fields] == [torch.int64] * len(int64) + [torch.int32] * len(int32)
    for number, field in enumerate(fields, start=1):
        assert field.tolist() == [number] * len(field)
        assert field.storage_offset() * field.itemsize % ALIGNMENT == 0
    assert len({f.untyped_storage().data_ptr() for f in fields}) <= 1


@given(SIZES, SIZES, st.integers(0, 70))
def test_fields_at_the_start_of_a_buffer_that_is_there(int64, int32, room):
    into = IntBuffer(words(int64, int32, room) + 3, "cpu")
    into.ints.fill_(-1)
    for first in (1, 7):
        packed = PackedInts(int64, int32, into=into, room=room)
        for number, field in enumerate(packed.host, start=first):
            field[:] = number
        fields = packed.to_device()
        for number, (field, size) in enumerate(zip(fields, [*int64, *int32], strict=True), start=first):
            assert field.tolist() == [number] * size
            assert field.data_ptr() == 0 or field.untyped_storage().data_ptr() == into.ints.data_ptr()
            assert field.storage_offset() * field.itemsize % ALIGNMENT == 0
    assert into.ints[-3:].tolist() == [-1] * 3


def test_a_buffer_keeps_the_views_of_few_layouts_only():
    into = IntBuffer(words([IntBuffer.KEPT + 2], []), "cpu")
    for size in range(IntBuffer.KEPT + 2):
        packed = PackedInts([size], [], into=into)
        packed.host[0][:] = size
        assert packed.to_device()[0].tolist() == [size] * size
    assert len(into._views) == 2


@given(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), max_size=4), SIZES)
def test_with_room_int32_fields_lie_where_they_lie_for_other_sizes(sizes, int64):
    places = []
    for side in (0, 1):
        fields = PackedInts(int64, [pair[side] for pair in sizes], room=70).to_device()
        places.append([field.storage_offset() for field in fields])
    assert places[0] == places[1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_rows_of_any_form(form, dtype):
    rows = [FORMS[form](row) for row in ROWS]
    joined = np.full(6, -1, dtype)
    write_joined(joined, rows, "pages")
    assert joined.tolist() == [number for row in ROWS for number in row]
    table = np.full((4, 5), -1, dtype)
    write_table(table, rows, "pages")
    assert table.tolist() == [row + [0] * (5 - len(row)) for row in ROWS]


def test_rows_of_several_forms_and_bytes_and_ranges():
    rows, expected = [b"ab", range(3, 5), np.array([9]), [1]], [97, 98, 3, 4, 9, 1]
    for some in (rows, rows[:2]):
        joined, table = np.zeros(sum(map(len, some)), np.int64), np.zeros((len(some), 2), np.int32)
        write_joined(joined, some, "tokens")
        assert joined.tolist() == expected[: len(joined)]
        write_table(table, some, "tokens")
        assert [n for row, t in zip(some, table.tolist(), strict=True) for n in t[: len(row)]] == joined.tolist()


@pytest.mark.parametrize("writer", ["joined", "table"])
@pytest.mark.parametrize(
    ("bad", "shown"),
    [([1.5], "1.5"), ([2**31], "2147483648"), ([-(2**31) - 1], "-2147483649"), (["7"], "'7'"), ([None], "None"),
     (np.array([1.5]), "1.5"), (np.array([2**40]), "1099511627776"), (np.array([[1]]), r"\[1\]"),
     (np.array([[1]], dtype=np.int32), r"\[1\]")],
)  # fmt: skip
def test_what_is_no_integer_of_32_bits_is_refused_with_its_request(writer, bad, shown):
    rows = [[1], bad]
    with pytest.raises(ValueError, match=f"the pages of request 1 must be integers of 32 bits; got .*{shown}"):
        if writer == "joined":
            write_joined(np.zeros(2, np.int32), rows, "pages")
        else:
            write_table(np.zeros((2, 1), np.int32), rows, "pages")
