"""Masks and biases read from tables: proved as far as the table goes, and the model is limited to that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.prove import mask_proof
from tests.passes.graphs import VOCAB, Toy, assert_ragged_equals_alone, masked, rewrite_of
from tests.passes.prove.test_mask_proof import Mask, rows
from tests.passes.written_out import SPELLINGS, WithPositions

LENGTH = 4096


def table_and_window(window: int) -> Mask:
    """MPT makes a table of its longest sequence in every call and takes the end of it."""

    def mask(ids: Tensor, pos: Tensor) -> Tensor:
        q, k = rows(ids)
        table = torch.arange(1 - LENGTH, 1).view(LENGTH)[-ids.shape[1] :] < 1
        return (k <= q) & (q - k < window) & table[None, :].expand(ids.shape[1], ids.shape[1])

    return mask


def test_a_number_that_is_a_tables_length_limits_the_model() -> None:
    result = rewrite_of(masked(table_and_window(LENGTH)))
    assert (result.specs[0].sliding_window, result.max_positions) == (None, LENGTH)  # a window that long never hides anything


def test_a_window_beside_a_table_is_not_taken_for_its_length() -> None:
    with pytest.raises(UnsupportedError, match=r"cannot be made for small probes, and none of its numbers \[300, 4095\] says why"):
        rewrite_of(masked(table_and_window(300)))


@pytest.mark.parametrize(("window", "expected"), [(LENGTH - 1, LENGTH - 1), (LENGTH + 1, None)])
def test_a_window_of_nearly_a_tables_length(window: int, expected: int | None) -> None:
    """The last of 4,096 tokens does not see the first through a window of 4,095; one of 4,097 never hides anything."""
    result = rewrite_of(masked(table_and_window(window)))
    assert (result.specs[0].sliding_window, result.max_positions) == (expected, LENGTH)


def test_a_stored_mask_limits_the_model_to_its_size() -> None:
    attend, kv_heads, _ = SPELLINGS["stored mask"]
    assert rewrite_of(Toy(WithPositions(attend), kv_heads=kv_heads)).max_positions == 128


def test_a_bias_by_key_is_tabulated_as_far_as_it_may_go() -> None:
    attend, kv_heads, _ = SPELLINGS["ALiBi in bfloat16"]
    result = rewrite_of(Toy(WithPositions(attend), kv_heads=kv_heads))
    assert result.gm is not None
    (table,) = dict(result.gm.named_buffers()).values()
    assert table.shape == (4, result.max_positions) and result.max_positions >= 2048


def test_a_bias_that_saturates_has_no_limit() -> None:
    attend, kv_heads, _ = SPELLINGS["T5"]
    assert rewrite_of(Toy(WithPositions(attend), kv_heads=kv_heads)).max_positions is None


def test_a_bias_that_changes_again_beyond_what_short_calls_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets by powers of 4: 609 tokens show no change beyond a distance of 255, and the next one is at 1,023."""
    for name in ("MOST_SATURATED_ELEMENTS", "MOST_BIAS_ELEMENTS"):
        monkeypatch.setattr(mask_proof, name, 4 * 1100**2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        index = torch.arange(q.shape[2])
        buckets = torch.log2((index[:, None] - index).clamp(min=0) + 1.0).div(2).floor()
        bias = (torch.arange(1, 5)[:, None, None] * torch.sin(buckets)).masked_fill(index > index[:, None], -torch.inf)
        return F.softmax(q @ k.transpose(-1, -2) + bias, -1) @ v

    result = rewrite_of(Toy(WithPositions(attend), kv_heads=4))
    assert result.gm is not None and result.max_positions == 1100
    (table,) = dict(result.gm.named_buffers()).values()
    for last in (254, 1022):
        assert torch.equal(table[:, last], table[:, last - 100]) and not torch.allclose(table[:, last], table[:, last + 1])


def test_slopes_of_more_heads_than_a_small_number() -> None:
    """The count of heads is a number of the subgraph that no mask explains."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slopes = torch.pow(torch.tensor(0.84), torch.arange(1, 1 + 32))[:, None, None]
        tokens = q.shape[2]
        bias = slopes * torch.arange(tokens) + torch.full((tokens, tokens), -torch.inf).triu(1)
        return F.softmax(q @ k.transpose(-1, -2) + bias, -1) @ v

    result = assert_ragged_equals_alone(Toy(WithPositions(attend), heads=32, kv_heads=32, dim=4))
    slopes = result.specs[0].alibi_slopes
    assert slopes is not None and slopes[:2] == (pytest.approx(0.84), pytest.approx(0.84**2))


class OwnTable(nn.Module):
    """Looks its positions up in a buffer of `places` numbers, and these in a table of `rows`, in one of these ways."""

    def __init__(self, way: Callable[[OwnTable, int], Tensor], places: int, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.embed, self.table = way, nn.Embedding(96, 16), nn.Embedding(rows, 16)
        self.qkv, self.head, self.places = nn.Linear(16, 48), nn.Linear(16, 96), nn.Buffer(torch.arange(places)[None])

    def forward(self, input_ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(input_ids) + self.way(self, input_ids.shape[1])).chunk(3, -1)
        attended: Tensor = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)
        return self.head(attended[:, 0])


WAYS: list[tuple[Callable[[OwnTable, int], Tensor], int, int, int]] = [
    (lambda model, count: model.table(model.places[:, :count]), 65, 64, 64),
    (lambda model, count: model.table(model.places[:, :count] + 1), 64, 64, 63),
    (lambda model, count: model.table(model.places[:, 1 : count + 1]), 65, 64, 63),
    (lambda model, count: model.table(model.places[:, torch.arange(count)]), 70, 64, 64),
    (lambda model, count: model.table.weight.index_select(0, torch.arange(count) + 1), 1, 64, 63),
]


@pytest.mark.parametrize(("way", "places", "rows", "expected"), WAYS)
def test_the_shortest_of_several_tables_limits_the_model(
    way: Callable[[OwnTable, int], Tensor], places: int, rows: int, expected: int
) -> None:
    model = OwnTable(way, places, rows).eval()
    prompt = [3 * i % 96 for i in range(expected - 4)]
    with LLM(model, num_pages=20) as llm:
        assert llm.engine.runner.max_positions == expected
        (answer,) = llm.generate([prompt], SamplingParams(max_tokens=20, temperature=0))
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) <= expected:
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert list(answer.token_ids) == ids[len(prompt) :]


class Named(nn.Module):
    """Learned positions; both tables are read with arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.learned = nn.Embedding(VOCAB, 32), nn.Embedding(40, 32)
        self.qkv, self.head = nn.Linear(32, 96), nn.Linear(32, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = F.embedding(input=input_ids, weight=self.table.weight) + F.embedding(weight=self.learned.weight, input=position_ids)
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).split(32, -1))
        return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def test_tables_read_with_arguments_by_name() -> None:
    assert assert_ragged_equals_alone(Named()).max_positions == 40
