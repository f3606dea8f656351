"""Blocks of what Inductor compiles for pieces: those of many rows, whatever was traced, and right for any number of rows."""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor.utils import fresh_cache, run_and_get_code

from paged_attn.capture.inductor.launch_sizes import ROWS, blocks_for_many_rows

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
