"""Blocks of what Inductor compiles for pieces: those of many rows, whatever was traced, and right for any number of rows."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from torch._inductor.utils import fresh_cache, run_and_get_code

from paged_attn.capture.inductor.launch_sizes import ROWS, blocks_for_many_rows
from paged_attn.capture.inductor.reductions import rows_in_any_order

COLUMNS = 96


def turned(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * 0.5 + torch.cat((-x[:, half:], x[:, :half]), -1) * 2


def hints(many: bool) -> list[int]:
    torch._dynamo.reset()
    x = torch.randn(6, COLUMNS, device="cuda")
    torch._dynamo.mark_dynamic(x, 0)
    compiled = torch.compile(turned)
    with torch.no_grad(), fresh_cache():
        if many:
            with blocks_for_many_rows():
                result, sources = run_and_get_code(compiled, x)
        else:
            result, sources = run_and_get_code(compiled, x)
        assert torch.equal(result, turned(x))
        for rows in (1, 2, 5, 127, 1024, 2048, 5001):
            x = torch.randn(rows, COLUMNS, device="cuda")
            assert torch.equal(compiled(x), turned(x)), rows
    return [int(found) for found in re.findall(r"size_hints=\{'x': (\d+)\}", "\n".join(sources))]


@pytest.mark.parametrize("many", [True, False])
def test_blocks_are_for_many_rows(many: bool) -> None:
    rows = ROWS if many else 6
    (found,) = set(hints(many))
    assert found == 1 << (rows * COLUMNS - 1).bit_length()


def turned_and_normed(x: torch.Tensor) -> torch.Tensor:
    """Llama 4's heads: neighbouring numbers are turned, then each head's 128 are normed."""
    pairs = x.unflatten(-1, (-1, 2))
    heads = torch.stack([pairs[..., 0] * 0.5 - pairs[..., 1], pairs[..., 1] * 0.5 + pairs[..., 0]], -1).flatten(2)
    return heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize("rows_known", [True, False])
def test_a_row_read_out_of_order_is_held_whole(rows_known: bool) -> None:
    torch._dynamo.reset()
    x = torch.randn(6, 4, 128, device="cuda")
    torch._dynamo.mark_dynamic(x, 0)
    compiled = torch.compile(turned_and_normed)
    with torch.no_grad(), fresh_cache(), rows_in_any_order() if rows_known else contextlib.nullcontext():
        _, sources = run_and_get_code(compiled, x)
        for rows in (1, 7, 500):
            x = torch.randn(rows, 4, 128, device="cuda")
            torch.testing.assert_close(compiled(x), turned_and_normed(x))
    assert ("@triton_heuristics.persistent_reduction" in "\n".join(sources)) is rows_known
