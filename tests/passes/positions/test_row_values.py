"""Values made from row numbers become functions of the batch's positions; row numbers stay; what is neither is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes import pass_list, runner
from tests.passes.graphs import Toy, Traced, assert_ragged_equals_alone, ragged_error, rewrite_of, trace

Change = Callable[[Tensor], Tensor]
NUMBERS = torch.arange(64).flip(0)
KINDS = (torch.arange(64) > 30).long()  # probes see rows that are all alike
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


def filled(q: Tensor) -> Tensor:
    angle = torch.arange(q.shape[2], dtype=torch.float32)[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.125])
    table = torch.zeros(q.shape[2], 8)
    table[:, 0::2], table[:, 1::2] = angle.sin(), angle.cos()
    return q + table


def longer_table(rows: int) -> Tensor:
    return (torch.outer(torch.arange(rows).float(), torch.tensor([1.0, 0.5, 0.25, 0.125]))).cos().repeat(1, 2)


POSITIONS: dict[str, tuple[Change, int]] = {
    "temperature": (temperature, 1),
    "rotary": (rotary, 4),
    "learned": (lambda q: q + 3 * F.embedding(torch.arange(q.shape[2]), TABLE), 1),
    "learned, with an offset": (lambda q: q + 3 * F.embedding(torch.arange(q.shape[2]) + 2, TABLE), 1),
    "learned, by index": (lambda q: q + 3 * TABLE[torch.arange(q.shape[2])], 1),
    "learned, by index_select": (lambda q: q + 3 * TABLE.index_select(0, torch.arange(q.shape[2])), 1),
    "two uses": (lambda q: (lambda p: q * (p % 3)[:, None] + TABLE[p])(torch.arange(q.shape[2])), 2),
    "from 1": (lambda q: q * torch.arange(1, q.shape[2] + 1)[:, None] * 0.1, 1),
    "in steps": (lambda q: q * torch.arange(3, q.shape[2] * 2 + 3, 2)[:, None] * 0.1, 1),
    "in steps, with a remainder beyond the probes": (lambda q: q * (torch.arange(q.shape[2]) * 5 % 163)[:, None] * 0.1, 1),
    "floating": (lambda q: q * torch.arange(q.shape[2], dtype=torch.float32)[:, None] * 0.1, 1),
    "running sum of ones": (lambda q: q * torch.ones_like(q[0, 0, :, :1]).cumsum(0) * 0.1, 1),
    "a table filled in place": (filled, 1),
    "some tokens": (lambda q: torch.where((torch.arange(q.shape[2]) % 3 == 1)[:, None], q * 9, q), 1),
    "rows of a table": (lambda q: q + 3 * TABLE[: q.shape[2]], 1),
    "rows of a table from the third": (lambda q: q + 3 * TABLE[2 : q.shape[2] + 2], 1),
    "rows of a table by narrow": (lambda q: q + 3 * TABLE.narrow(0, 1, q.shape[2]), 1),
    "rows of a table of many dimensions": (lambda q: q + 3 * TABLE[None, None, :, :4][:, :, : q.shape[2]].repeat(1, 1, 1, 2), 1),
    "rows of a table of positions": (lambda q: q + 3 * F.embedding(NUMBERS[: q.shape[2]], TABLE), 1),
    "rows of a table of twice the tokens": (lambda q: q + longer_table(max(2 * q.shape[2], 16))[: q.shape[2]][-q.shape[2] :], 1),  # Qwen-7B
    "rows of a table of the longest call": (lambda q: q + longer_table(max(q.shape[2], 77))[: q.shape[2]], 1),  # OpenELM
    "the queries": (lambda q: 3 * F.embedding(torch.arange(q.shape[2]), TABLE).expand(1, 4, -1, -1), 1),  # PanGu's last layer
    "from 0 by name": (lambda q: q * torch.arange(0, q.shape[2])[:, None] * 0.1, 1),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_are_redirected(name: str) -> None:
    change, count = POSITIONS[name]
    assert assert_ragged_equals_alone(changing(change)).positions_redirected == count


@pytest.mark.parametrize("name", POSITIONS)
def test_without_the_pass_ragged_rows_would_be_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_list, "use_own_positions", lambda graph, form, values, longest: (0, None))
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


HARMLESS: dict[str, Change] = {
    "ones": lambda q: q * torch.ones(q.shape[2], 1),
    "zeros as a kind of token": lambda q: q + F.embedding(torch.zeros(1, q.shape[2], dtype=torch.int64), TABLE)[:, None],
    "written over": lambda q: torch.zeros_like(q).index_copy_(2, torch.arange(q.shape[2]), q),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_the_same_for_every_row_stays(name: str) -> None:
    assert assert_ragged_equals_alone(changing(HARMLESS[name])).positions_redirected == 0


def written_over(q: Tensor) -> Tensor:
    rows = torch.arange(8 * q.shape[2]).view(-1, 8).float()
    return q + rows.index_add_(0, torch.arange(q.shape[2]), q[0, 0])


REFUSED: dict[str, tuple[Change, str]] = {
    "from the end": (lambda q: q * torch.arange(q.shape[2]).flip(0)[:, None], "or on other rows besides its own"),
    "a softmax over the row": (lambda q: q + torch.arange(q.shape[2]).float().softmax(0)[:, None], "or on other rows"),
    "changed in place": (lambda q: q * torch.arange(q.shape[2]).add_(1)[:, None], "or on other rows"),
    "from the end of a longer table": (lambda q: q + longer_table(2 * q.shape[2])[-q.shape[2] :], "or on other rows besides its own"),
    "random": (lambda q: q * torch.rand(q.shape[2], 1), "differs from row to row"),
    "the length in every row": (lambda q: q * torch.full((q.shape[2], 1), 1.0 * q.shape[2]), "or with that number"),
    "the logarithm of the length": (lambda q: q * torch.tensor(1.0 * q.shape[2]).log(), "depend on the number of tokens"),
    "the length as a number": (lambda q: q * (q.shape[2] / 10), "goes into the numbers of"),
    "tokens against tokens": (lambda q: torch.ones(q.shape[2], q.shape[2]).triu() @ q, "depend on the number of tokens"),
    "a row number written over": (written_over, "is written over in part"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_values_made_from_the_number_of_tokens_are_refused(name: str) -> None:
    change, words = REFUSED[name]
    with pytest.raises(UnsupportedError, match=rf"is made from the number of tokens and .*{words}.*compute it from position_ids"):
        rewrite_of(changing(change))


def test_rows_of_a_table_that_begin_alike_are_rows_of_a_table() -> None:
    module = changing(lambda q: q + 3 * F.embedding(KINDS[: q.shape[2]], TABLE))
    assert assert_ragged_equals_alone(module).positions_redirected == 1


def test_rows_from_one_are_no_positions() -> None:
    module = changing(lambda q: F.pad(q, (0, 0, 1, 0))[:, :, torch.arange(1, q.shape[2] + 1)])
    assert assert_ragged_equals_alone(module).positions_redirected == 0


def test_an_inverse_permutation_is_made_of_row_numbers() -> None:
    def sorted_and_back(q: Tensor) -> Tensor:
        order = q[0, 0, :, 0].argsort()
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0])
        return (q[:, :, order] * 2)[:, :, inverse]

    assert assert_ragged_equals_alone(changing(sorted_and_back)).positions_redirected == 0


def test_the_batch_positions_are_never_written() -> None:
    def graph_writes(traced: Traced) -> bool:
        gm = runner.rewrite(traced.gm, traced.args, None).gm
        assert gm is not None
        return any(node.op == "call_method" and str(node.target).endswith("_") for node in gm.graph.nodes)

    assert not trace(changing(temperature), graph_writes).result


LIMITS: dict[str, tuple[Change, int | None]] = {
    "learned": (lambda q: q + F.embedding(torch.arange(q.shape[2]), TABLE), 64),
    "learned, with an offset": (lambda q: q + F.embedding(torch.arange(q.shape[2]) + 2, TABLE), 62),
    "sliced": (lambda q: q + TABLE[: q.shape[2]], 64),
    "clamped": (lambda q: q + F.embedding(torch.arange(q.shape[2]).clamp(max=63), TABLE), None),
    "computed": (rotary, None),
}


@pytest.mark.parametrize("name", LIMITS)
def test_how_many_positions_there_are(name: str) -> None:
    change, limit = LIMITS[name]
    assert rewrite_of(changing(change)).max_positions == limit


def test_a_length_that_is_made_a_number_stays_symbolic() -> None:
    with pytest.raises(UnsupportedError, match="truediv"):
        rewrite_of(changing(lambda q: q * (q.shape[2] / 10)))
