"""Attention whose mask or bias is computed from hidden states: recomputed from all tokens of each request, or refused with the reason."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.specs.recompute import RecomputeSpec
from paged_attn.passes.report import Rewrite
from tests.passes.graphs import Toy, assert_ragged_equals_alone, rewrite_of
from tests.passes.written_out import SCALE, WithPositions, mask, repeated, visible


def toy(attend: Callable[..., Tensor], kv_heads: int = 4) -> Toy:
    return Toy(WithPositions(attend), kv_heads=kv_heads)


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def chosen(q: Tensor, k: Tensor, count: int) -> Tensor:
    """[1, 1, T, T] bool: the `count` visible keys that score highest for each query."""
    scores = (q.mean(1) @ k.mean(1).transpose(-1, -2)).masked_fill(~visible(q), float("-inf"))
    indices = scores.topk(min(count, q.shape[2]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, indices, True)[:, None] & visible(q)


def top_k(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, chosen(q, k, 6))


def top_k_of_many(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, chosen(q, k, 64))


def top_k_written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2) * SCALE).masked_fill(~chosen(q, k, 6), float("-inf"))
    return F.softmax(scores, -1) @ v


def content_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, mask(q) + k.sum(-1)[:, :, None])


def content_bias_in_places(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.zeros(1, 4, q.shape[2], q.shape[2])
    bias += k.sum(-1)[:, :, None]
    bias.masked_fill_(~visible(q), float("-inf"))
    return sdpa(q, k, v, bias)


def keys_filled_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys = k.new_empty(k.shape)
    keys[..., :4] = k[..., 4:]
    keys[..., 4:] = k[..., :4]
    return sdpa(q, keys, v, mask(q) + k.sum(-1)[:, :, None])


def forgetting(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gates = F.logsigmoid(v.sum(-1)).cumsum(-1)
    return sdpa(q, k, v, mask(q) + gates[..., None] - gates[:, :, None])


def forgetting_written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gates = torch.cumsum(F.logsigmoid(v.sum(-1)), dim=-1)
    scores = q @ k.transpose(-1, -2) * SCALE + (gates[..., None] - gates[:, :, None])
    return F.softmax(scores + mask(q), -1) @ v


def sum_written_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gates = torch.zeros(1, 4, q.shape[2])
    gates.copy_(F.logsigmoid(v.sum(-1)).cumsum(-1))
    return sdpa(q, k, v, mask(q) + gates[..., None] - gates[:, :, None])


def sum_in_float64(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gates = F.logsigmoid((v.double() * k).sum(-1)).cumsum(-1)
    return sdpa(q, k, v, mask(q) + (gates[..., None] - gates[:, :, None]).float())


def sum_by_matrix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The running sum as a product with a triangle of ones."""
    gates = F.logsigmoid(v.sum(-1)) @ visible(q).float().transpose(-1, -2)
    return sdpa(q, k, v, mask(q) + gates[..., None] - gates[:, :, None])


def smoothed_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A convolution over tokens on the way to the mask, too wide to be an op of its own."""
    flat = k.transpose(-1, -2).flatten(1, 2)
    smooth = F.conv1d(F.pad(flat, (18, 0)), torch.full((1, 1, 19), 0.1).expand(flat.shape[1], 1, 19), groups=flat.shape[1])
    return sdpa(q, k, v, mask(q) + smooth.mean(1)[:, None, None])


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, repeated(k), repeated(v), mask(q) + repeated(k).sum(-1)[:, :, None])


def hidden_by_sign(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A comparison of each token lies on the way."""
    seen = (k.sum((1, 3)) > 0)[:, None, None] | torch.eye(q.shape[2], dtype=torch.bool)
    return sdpa(q, k, v, seen & visible(q))


def with_empty_part(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rest, none = k.split([8, 0], dim=-1)
    return sdpa(q, torch.cat([rest, none], -1), v, mask(q) + rest.sum(-1)[:, :, None] + (none @ none.transpose(-1, -2)))


def top_k_of_gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A bias that is looked up by distance in a row of each query."""
    index = torch.arange(q.shape[2])
    distance = (index[:, None] - index).clamp(0, 7)[None, None].expand(1, 4, -1, -1)
    return sdpa(q, k, v, mask(q) + torch.gather(torch.tanh(q), -1, distance))


def viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is recomputed views keys as they lie in memory."""
    return sdpa(q, k, v, mask(q) + (k.transpose(1, 2).view(1, -1, 32) @ q.transpose(1, 2).reshape(1, -1, 32).transpose(1, 2))[:, None])


class Weighted(nn.Module):
    """The mask is made with the module's own parameter and buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8))
        self.register_buffer("slopes", torch.tensor([0.1, 0.2, 0.3, 0.4]))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        index = torch.arange(q.shape[2])
        distance = (index - index[:, None]) * self.slopes[:, None, None]
        return sdpa(q, k, v, mask(q) + (q * self.weight) @ k.transpose(-1, -2) + distance)


def talking_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores of all heads go into each."""
    scores = torch.einsum("bhij,gh->bgij", q @ k.transpose(-1, -2) * SCALE, MIXING)
    return (scores + mask(q)).softmax(-1) @ v


def talking_heads_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights of all heads, through a convolution, which takes one dtype."""
    weights = (q @ k.transpose(-1, -2) * SCALE + mask(q)).softmax(-1).to(q.dtype)
    return F.conv2d(weights, MIXING[:, :, None, None]) @ v


def gates_for_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(q @ k.mT * SCALE - 2).masked_fill(~visible(q), 0.0) @ v


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights that add up to 1, and are not softmax of q.k."""
    weights = (F.elu(q) + 1) @ (F.elu(k) + 1).mT * visible(q)
    return weights / weights.sum(-1, keepdim=True) @ v


def retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """RetNet: weights below 0, too."""
    index = torch.arange(q.shape[2])
    return (q @ k.mT * (0.9 ** (index[:, None] - index).clamp(min=0)) * visible(q)) @ v


def _powers(q: Tensor, k: Tensor) -> Tensor:
    return torch.exp(q @ k.mT * SCALE) * visible(q)


def hidden_after_their_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows of up to 31 tokens add up to 1."""
    powers = _powers(q, k)
    return powers / powers.sum(-1, keepdim=True) * visible(q).triu(-30) @ v


def bounded_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    powers = _powers(q, k)
    return powers / powers.sum(-1, keepdim=True).clamp(min=1.0) @ v


def a_little_more(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    powers = _powers(q, k)
    return powers / powers.sum(-1, keepdim=True) * 1.015 @ v


def zero_where_q_k_is(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).relu().square() * visible(q)
    return weights / (weights.sum(-1, keepdim=True) + 1e-3) @ v


NOT_ONE = (hidden_after_their_sum, bounded_sum, a_little_more, zero_where_q_k_is)
MIXING = torch.randn(4, 4, generator=torch.Generator().manual_seed(2)) * 0.5
SPELLINGS: dict[str, tuple[Callable[..., Tensor], int]] = {
    f.__name__: (f, 4)
    for f in (top_k, top_k_of_many, top_k_written_out, content_bias, content_bias_in_places, keys_filled_in_place, forgetting,
              forgetting_written_out, sum_by_matrix, sum_written_in_place, sum_in_float64, smoothed_keys, hidden_by_sign, with_empty_part,
              top_k_of_gathered, viewed, talking_heads, talking_heads_after, gates_for_weights, linear_attention, retention, *NOT_ONE)
} | {"grouped": (grouped, 2), "with its own tensors": (Weighted(), 4)}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_runs_ragged(name: str) -> None:
    attend, kv_heads = SPELLINGS[name]
    result = assert_ragged_equals_alone(toy(attend, kv_heads))
    (spec,) = result.specs
    assert isinstance(spec, RecomputeSpec)
    assert (spec.num_q_heads, spec.num_kv_heads, spec.v_head_dim, spec.causal) == (4, 1, 0, True)


def test_what_the_report_says(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paged_attn"):
        (report,) = rewrite_of(toy(content_bias)).layers
    assert (report.found_by, report.spec.module) == ("F.sdpa", "attend")
    assert report.proof.startswith("mask computed from hidden states: recomputed from each request's history")
    assert report.spec.describe() == "4 heads, causal, recomputed from all tokens: 100 values a token"  # q, k, v and the keys' sums
    assert sum("grows with the square of the length" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("attend", [talking_heads, talking_heads_after])
def test_the_report_says_that_heads_are_mixed(attend: Callable[..., Tensor]) -> None:
    (report,) = rewrite_of(toy(attend)).layers
    assert report.proof.startswith("heads mixed: recomputed from each request's history")


@pytest.mark.parametrize("attend", [gates_for_weights, linear_attention, retention, *NOT_ONE])
def test_the_report_says_that_no_softmax_makes_the_weights(attend: Callable[..., Tensor]) -> None:
    (report,) = rewrite_of(toy(attend)).layers
    assert report.proof.startswith("weights that no softmax makes: recomputed from each request's history")


def rows_of(result: Rewrite) -> list[int]:
    (spec,) = result.specs
    assert isinstance(spec, RecomputeSpec)
    return sorted(row.width for row in spec.rows)


def test_keys_are_kept_before_they_are_repeated() -> None:
    assert rows_of(rewrite_of(toy(grouped, 2))) == [4, 16, 16, 32]  # the sums of repeated keys, keys, values, queries


def test_wide_values_take_several_elements_of_the_pages() -> None:
    (spec,) = rewrite_of(toy(sum_in_float64)).specs
    assert isinstance(spec, RecomputeSpec)
    assert sorted((row.width, row.elements) for row in spec.rows) == [(4, 8), (32, 32), (32, 32), (32, 32)]


def test_what_is_written_from_scores_is_recomputed_even_if_no_number_shows_it() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        many = torch.zeros(1, 4, q.shape[2])
        many.copy_(((q @ k.transpose(-1, -2)) > 1e9).float().sum(-1))
        return sdpa(q, k, v, mask(q) + many[:, :, None])

    assert rows_of(rewrite_of(toy(attend))) == [32, 32, 32]


def test_a_running_sum_is_kept_before_it_is_summed() -> None:
    result = rewrite_of(toy(forgetting))
    assert result.gm is not None and not [node for node in result.gm.graph.nodes if "cumsum" in node.name]


def test_nothing_of_the_mask_is_left() -> None:
    result = rewrite_of(toy(top_k))
    assert result.gm is not None and not [node for node in result.gm.graph.nodes if "topk" in node.name or "masked_fill" in node.name]


class ByPosition(nn.Module):
    """The mask compares position_ids."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        seen = pos[:, None, None] <= pos[:, None, :, None]
        return sdpa(q, k, v, torch.where(seen, k.sum(-1)[:, :, None] * torch.cos(pos * 0.3)[:, None, :, None], float("-inf")))


def test_masks_from_position_ids_count_from_the_requests_start() -> None:
    assert_ragged_equals_alone(Toy(ByPosition(), kv_heads=4))


def test_among_other_attentions_in_graph_order() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        second = content_bias(first, k, v)  # its queries are another attention's result
        third = F.scaled_dot_product_attention(second, k, v, is_causal=True)
        return top_k_written_out(third, k, v)

    result = assert_ragged_equals_alone(toy(attend))
    assert [isinstance(spec, RecomputeSpec) for spec in result.specs] == [False, True, False, True]
    assert [layer.found_by for layer in result.layers] == ["F.sdpa", "F.sdpa", "F.sdpa", "softmax"]
    assert [spec.kv_layer for spec in result.specs] == [0, 1, 0, 3]


def test_a_mask_shared_by_two_attentions_is_kept_for_both() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = chosen(q, k, 6)
        return sdpa(sdpa(q, k, v, seen) * 2, k, v, seen)

    result = assert_ragged_equals_alone(toy(attend))
    assert all(isinstance(spec, RecomputeSpec) for spec in result.specs)


def test_equal_programs_are_told_apart_from_others() -> None:
    def twice(bias: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return content_bias(q, k, v) + sdpa(q, k, v, (mask(q) + k.sum(-1)[:, :, None]) * bias)

        return attend

    first, same = rewrite_of(toy(lambda q, k, v: content_bias(q, k, v) + content_bias(q, k, v))).specs
    _, other = rewrite_of(toy(twice(2.0))).specs
    assert first.differences(same) == ["kv_layer"]
    assert replace(first, kv_layer=1, module="").__hash__() == replace(same, module="").__hash__()
    assert "computes" in same.differences(other)


def changed_after_it_was_read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first = k[..., 0]
    bias = first[:, :, :, None] * first[:, :, None]
    k.mul_(2.0)
    return sdpa(q, k, v, bias + mask(q))


def sees_the_mean(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, mask(q) + (k * k.mean(2, keepdim=True)).sum(-1)[:, :, None])


def chooses_among_later_tokens(count: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.mean(1) @ k.mean(1).transpose(-1, -2)
        indices = scores.topk(min(count, q.shape[2]), dim=-1).indices
        seen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, indices, True) | torch.eye(q.shape[2], dtype=torch.bool)
        return sdpa(q, k, v, seen[:, None] & visible(q))

    return attend


def sharper_in_calls_beyond(tokens: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2) * SCALE + k.sum(-1)[:, :, None]) * (1 + max(0, q.shape[2] - tokens) / 32)
        return F.softmax(scores + mask(q), -1) @ v

    return attend


class SinksOnOutput(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * SCALE + mask(q) + k.sum(-1)[:, :, None]
        return F.softmax(scores, -1) @ v * torch.logsumexp(scores, -1).sigmoid()[..., None]


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "acausal": (sees_the_mean, "a later token changes the result of an earlier one"),
    "acausal top-k": (chooses_among_later_tokens(6), "a later token changes the result of an earlier one"),
    "acausal top-k of many": (chooses_among_later_tokens(64), "a later token changes the result of an earlier one"),
    "sharper in longer calls": (sharper_in_calls_beyond(50), "a later token changes the result of an earlier one"),
    "sharper in much longer calls": (sharper_in_calls_beyond(2048), "made from the number of tokens"),
    "changed in place": (changed_after_it_was_read, r"changed in place by \w+ after it was read"),
    "log-sum-exp": (SinksOnOutput(), "computed from the tokens' hidden states"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    attend, why = REFUSED[name]
    with pytest.raises(UnsupportedError, match=rf"layer at attend.*{why}"):
        rewrite_of(toy(attend))


class ByToken(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        return sdpa(q, k, v, torch.where((ids != 3)[:, None, None] & visible(q), k.sum(-1)[:, :, None], -100.0))


class ByTokenOfEach(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        return sdpa(q, k, v, mask(q) + k.sum(-1)[:, :, None] * (ids == 3)[:, None, None])


def test_what_ids_change_of_a_floating_value_is_kept_with_it() -> None:
    assert_ragged_equals_alone(Toy(ByTokenOfEach(), kv_heads=4))


def test_a_mask_from_token_ids_besides_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"also made from input_ids \(int64 \[1, s\d+\]\), which has no floating-point row for each token"
    ):
        rewrite_of(Toy(ByToken(), kv_heads=4))


@pytest.mark.parametrize("name", ["mixing", "token_dim"])
def test_these_comparisons_see_what_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a running sum that is taken for rows, or rows laid out otherwise, give other logits."""
    from paged_attn.passes.recompute import region
    from paged_attn.passes.recompute import replace as replacing

    made = replacing.row_input
    if name == "mixing":
        monkeypatch.setattr(region, "mixing_nodes", lambda *_: set())
    else:
        monkeypatch.setattr(replacing, "row_input", lambda *given: replace(made(*given), token_dim=1))
    with pytest.raises((AssertionError, RuntimeError, UnsupportedError)):
        assert_ragged_equals_alone(toy(forgetting))
