"""Positions that a model counts along the row become the batch's; row numbers stay; what is neither is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes import runner
from tests.passes.graphs import Toy, Traced, assert_ragged_equals_alone, ragged_error, rewrite_of, trace

Change = Callable[[Tensor], Tensor]
TABLE = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))


def changing(change: Change) -> Toy:
    """The queries [1, 4, T, 8] go through `change` before attention."""

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(change(q), k, v, is_causal=True, enable_gqa=True)

    return Toy(attend)


def temperature(q: Tensor) -> Tensor:
    """Llama 4's."""
    positions = torch.arange(q.shape[2])
    return q * (torch.log1p(torch.floor((positions.float() + 1.0) / 4)) * 3 + 1)[None, None, :, None]


def rotary(q: Tensor) -> Tensor:
    angle = torch.arange(0, q.shape[2], device=q.device)[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.125])
    a, b = q.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


POSITIONS: dict[str, tuple[Change, int]] = {
    "temperature": (temperature, 1),
    "rotary": (rotary, 1),
    "learned": (lambda q: q + 3 * F.embedding(torch.arange(q.shape[2]), TABLE), 1),
    "learned, with an offset": (lambda q: q + 3 * F.embedding(torch.arange(q.shape[2]) + 2, TABLE), 1),
    "learned, by index": (lambda q: q + 3 * TABLE[torch.arange(q.shape[2])], 1),
    "learned, by index_select": (lambda q: q + 3 * TABLE.index_select(0, torch.arange(q.shape[2])), 1),
    "two uses": (lambda q: (lambda p: q * (p % 3)[:, None] + TABLE[p])(torch.arange(q.shape[2])), 2),
    "from 0 by name": (lambda q: q * torch.arange(0, q.shape[2])[:, None] * 0.1, 1),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_are_redirected(name: str) -> None:
    change, count = POSITIONS[name]
    assert assert_ragged_equals_alone(changing(change)).positions_redirected == count


@pytest.mark.parametrize("name", POSITIONS)
def test_without_the_pass_ragged_rows_would_be_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "use_batch_positions", lambda graph, form: 0)
    module = changing(POSITIONS[name][0])
    error = trace(module, lambda t: ragged_error(module, runner.rewrite(t.gm, t.args, None), t.args, (5, 24, 13))).result
    assert error > 1e-3


def dispatch(q: Tensor) -> Tensor:
    """As in a mixture of experts: rows are picked, changed and added back."""
    rows = torch.arange(q.shape[2])
    flat = q.transpose(1, 2).flatten(2)[0]
    return torch.zeros_like(flat).index_add_(0, rows, flat[rows] * 2).unflatten(-1, (4, 8)).transpose(0, 1)[None]


ROWS: dict[str, Change] = {
    "getitem": lambda q: q[:, :, torch.arange(q.shape[2])],
    "index_select": lambda q: q.index_select(2, torch.arange(q.shape[2])),
    "dispatch": dispatch,
    "gather": lambda q: q.gather(2, torch.arange(q.shape[2])[None, None, :, None].expand(1, 4, -1, 8)),
    "of experts, not of tokens": lambda q: q * torch.arange(8),
}


@pytest.mark.parametrize("name", ROWS)
def test_row_numbers_stay(name: str) -> None:
    assert assert_ragged_equals_alone(changing(ROWS[name])).positions_redirected == 0


REFUSED: dict[str, tuple[Change, str]] = {
    "from 1": (lambda q: q * torch.arange(1, q.shape[2] + 1)[:, None], "only arange\\(T\\) of int64 is known"),
    "in steps": (lambda q: q * torch.arange(0, q.shape[2] * 2, 2)[:, None], "only arange\\(T\\) of int64"),
    "floating": (lambda q: q * torch.arange(q.shape[2], dtype=torch.float32)[:, None], "of torch.float32; only"),
    "changed in place": (lambda q: q * torch.arange(q.shape[2]).add_(1)[:, None], "changes the numbers in place"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_counts_are_refused(name: str) -> None:
    change, words = REFUSED[name]
    with pytest.raises(UnsupportedError, match=rf"counts tokens along the row with torch\.arange.*{words}"):
        rewrite_of(changing(change))


def test_rows_from_one_are_no_positions() -> None:
    module = changing(lambda q: F.pad(q, (0, 0, 1, 0))[:, :, torch.arange(1, q.shape[2] + 1)])
    assert assert_ragged_equals_alone(module).positions_redirected == 0


def test_the_batch_positions_are_never_written() -> None:
    def graph_writes(traced: Traced) -> bool:
        gm = runner.rewrite(traced.gm, traced.args, None).gm
        assert gm is not None
        return any(node.op == "call_method" and str(node.target).endswith("_") for node in gm.graph.nodes)

    assert not trace(changing(temperature), graph_writes).result
