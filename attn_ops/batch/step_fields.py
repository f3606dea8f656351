"""The integers of a step by name, in one order on the host, on the device and in the sizes of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

NUM_LENGTHS = 5  # fields of a number for each request


class StepFields(NamedTuple):
    """Arrays or tensors: of int64 T rows, N logits_rows and each group's T slots; of int32 the others, by request.

    `page_tables` come last because their width varies.
    """

    input_ids: Any
    positions: Any
    logits_rows: Any
    slots: list[Any]
    seq_lens: Any
    query_lens: Any
    query_start: Any
    state_slots: Any
    request_lens: Any
    page_tables: list[Any]

    @classmethod
    def of(cls, fields: Sequence[Any], num_groups: int, num_requests: int, num_pages: int) -> StepFields:
        """Of the fields of a `PackedInts` with the sizes of `sizes`."""
        ids, positions, logits_rows, *rest = fields
        slots, lengths, tables = rest[:num_groups], rest[num_groups : num_groups + NUM_LENGTHS], rest[num_groups + NUM_LENGTHS :]
        return cls._make([ids, positions, logits_rows, slots, *lengths, [table.reshape(num_requests, num_pages) for table in tables]])

    @staticmethod
    def sizes(rows: int, logits: int, num_requests: int, num_pages: int, num_groups: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the int64 fields, and of the int32 fields."""
        lengths = (num_requests, num_requests, num_requests + 1, num_requests, num_requests)
        wide = (rows, rows, logits, *(rows,) * num_groups)
        return wide, (*lengths, *(num_requests * num_pages,) * num_groups)
