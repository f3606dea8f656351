"""Attention that is written out as a softmax: found and proved in many spellings, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from tests.passes.graphs import Toy, assert_ragged_equals_alone, rewrite_of
from tests.passes.written_out import SCALE, SPELLINGS, WithPositions, divided_by_the_sum, mask, plain, visible


def toy(attend: Callable[..., Tensor], kv_heads: int = 4) -> Toy:
    return Toy(WithPositions(attend), kv_heads=kv_heads)


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_runs_ragged(name: str) -> None:
    attend, kv_heads, says = SPELLINGS[name]
    result = assert_ragged_equals_alone(toy(attend, kv_heads))
    (spec,) = result.specs
    assert (spec.num_q_heads, spec.num_kv_heads, spec.causal) == (4, kv_heads, True)
    for field, value in says.items():
        assert getattr(spec, field) == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), field


def test_groups_whose_heads_are_not_neighbours_keep_keys_and_values_of_each_head() -> None:
    from tests.passes.written_out import einsum_groups_first

    assert assert_ragged_equals_alone(toy(einsum_groups_first, 2)).specs[0].num_kv_heads == 4


def test_one_head_at_a_time_is_as_many_layers() -> None:
    from tests.passes.written_out import head_by_head

    result = assert_ragged_equals_alone(toy(head_by_head))
    assert [(spec.num_q_heads, spec.num_kv_heads) for spec in result.specs] == [(1, 1)] * 4


def test_values_of_another_width() -> None:
    result = assert_ragged_equals_alone(Toy(WithPositions(plain), kv_heads=4, v_dim=6))
    assert (result.specs[0].qk_head_dim, result.specs[0].v_head_dim) == (8, 6)


def test_attention_of_both_kinds_in_graph_order() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)
        second = plain(first, k, v)
        return F.scaled_dot_product_attention(second, k, v, is_causal=True, scale=0.25)

    result = assert_ragged_equals_alone(toy(attend))
    assert [layer.found_by for layer in result.layers] == ["F.sdpa", "softmax", "F.sdpa"]
    assert [spec.kv_layer for spec in result.specs] == [0, 1, 0]  # the second transposes its keys


@pytest.mark.parametrize("attend", [plain, divided_by_the_sum])
def test_nothing_of_the_scores_is_left(attend: Callable[..., Tensor]) -> None:
    result = rewrite_of(toy(attend))
    assert result.gm is not None
    assert not [node for node in result.gm.graph.nodes if any(word in node.name for word in ("softmax", "stand_in", "exp_", "log"))]


def test_sinks_are_the_models_own_parameter_and_follow_it() -> None:
    attend, kv_heads, _ = SPELLINGS["sinks"]
    result = rewrite_of(toy(attend, kv_heads))
    assert result.gm is not None and not dict(result.gm.named_buffers())


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * SCALE + mask(q)


def temperature_by_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = torch.arange(q.shape[-2])[:, None] + 1.0
    return F.softmax(q @ k.transpose(-1, -2) * torch.log(rows + 1.0) + mask(q), -1) @ v


def bias_of_both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    index = torch.arange(q.shape[-2])
    return F.softmax(scores(q, k) + torch.sin(index[:, None] * index * 0.1), -1) @ v


def weights_that_fade(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = torch.arange(q.shape[-2])
    fading = 1 - ((rows[:, None] - rows).clamp(min=19) - 19) * 0.1  # no large number, and nothing on a dozen tokens
    return (F.softmax(scores(q, k), -1) * fading) @ v


def scale_by_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-1, -2) * (q.shape[-2] // 20 + 1) + mask(q), -1) @ v


def weaker_blocks_away(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A block of 16 and the one before it in full; no number is large."""
    blocks = torch.arange(q.shape[-2]) // 16
    products = q @ k.transpose(-1, -2) * SCALE
    return F.softmax(torch.where(blocks[:, None] - blocks >= 2, products * 0.3, products) + mask(q), -1) @ v


DECAY = torch.where(torch.arange(700)[:, None] - torch.arange(700) < 150, 1.0, 0.3)


def weaker_by_a_table(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-1, -2) * DECAY[: q.shape[-2], : q.shape[-2]] + mask(q), -1) @ v


def weights_that_end_by_a_table(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (F.softmax(scores(q, k), -1) * (DECAY[: q.shape[-2], : q.shape[-2]] == 1)) @ v


def test_a_dropout_that_is_off_changes_nothing() -> None:
    assert rewrite_of(toy(lambda q, k, v: F.dropout(F.softmax(scores(q, k), -1), 0.01, training=False) @ v)).layers


def late_rows(scores: Tensor) -> Tensor:
    """5 from the 40th row on, [1, 4, T, 1]."""
    return ((torch.arange(scores.shape[2]) // 20 >= 2) * 5.0)[None, None, :, None].expand(1, 4, -1, 1)


def distance(q: Tensor) -> Tensor:
    index = torch.arange(q.shape[2])
    return (index[:, None] - index).clamp(min=0)


def written_before_the_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    powers = torch.exp(scores(q, k))
    product = powers @ v
    powers.mul_(0.5)
    return product / powers.sum(-1, keepdim=True)


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = {
    "weaker blocks away": (weaker_blocks_away, r"another function of q\.k on \d+ tokens"),
    "weaker by a table": (weaker_by_a_table, r"another function of q\.k on \d+ tokens"),
    "weights that end by a table": (weights_that_end_by_a_table, "they are changed before"),
    "weights that end": (lambda q, k, v: (F.softmax(scores(q, k), -1) * visible(q).triu(-30)) @ v, "after the softmax hold 30"),
    "weights that fade": (weights_that_fade, "they are changed before"),
    "scale by length": (scale_by_length, "made from the number of tokens, goes into the numbers of"),
    "two products": (lambda q, k, v: F.softmax(scores(q, k) + k @ q.transpose(-1, -2), -1) @ v, "the sum of 2 products"),
    "no product": (lambda q, k, v: F.softmax((q[..., :1] + k[..., :1].transpose(-1, -2)) + mask(q), -1) @ v, "no matrix product"),
    "over queries": (lambda q, k, v: F.softmax(scores(q, k), -2) @ v, "neither scale"),
    "over queries, transposed": (lambda q, k, v: F.softmax(scores(q, k).mT, -1).mT @ v, "neither scale"),
    "weights squared": (lambda q, k, v: F.softmax(scores(q, k), -1).square() @ v, "they are changed before"),
    "weights masked": (lambda q, k, v: (F.softmax(scores(q, k), -1) * visible(q).triu(-3)) @ v, "they are changed before"),
    "weights used twice": (lambda q, k, v: (p := F.softmax(scores(q, k), -1)) @ v + p @ v.flip(-1), "in 2 places"),
    "square of scores": (lambda q, k, v: F.softmax((q @ k.transpose(-1, -2)) ** 2 + mask(q), -1) @ v, "neither scale"),
    "scale by row": (temperature_by_row, "neither scale"),
    "softcap by head": (
        lambda q, k, v: F.softmax((scores := q @ k.mT).tanh() * torch.arange(1, 5).view(4, 1, 1) + mask(scores), -1) @ v, "neither scale"
    ),
    "sink of the largest score": (
        lambda q, k, v: F.softmax(torch.cat([s := scores(q, k), s.amax(-1, keepdim=True)], -1), -1)[..., :-1] @ v, "sink is made of q.k"
    ),
    "sink that changes later": (
        lambda q, k, v: F.softmax(torch.cat([s := scores(q, k), late_rows(s)], -1), -1)[..., :-1] @ v, "its sinks differ between 609"
    ),
    "powers written before their sum": (written_before_the_sum, "weights"),
    "weights used elsewhere": (lambda q, k, v: (p := F.softmax(scores(q, k), -1)) @ v + p.amax(-1, keepdim=True), "go into amax, too"),
    "two sinks": (lambda q, k, v: F.softmax(F.pad(scores(q, k), (0, 2)), -1)[..., :-2] @ v, "2 columns besides"),
    "scores transposed": (lambda q, k, v: F.softmax((k @ q.transpose(-1, -2)).transpose(2, 3) + mask(q), -1) @ v, "neither scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    attend, why = REFUSED[name]
    with pytest.raises(UnsupportedError, match=rf"layer at attend.*{why}"):
        rewrite_of(toy(attend))


def bias_that_begins_later(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(scores(q, k) - (distance(q) * (1 / 300) - 3).clamp(min=0) - distance(q) / 16, -1) @ v


@pytest.mark.parametrize("attend", [bias_that_begins_later, bias_of_both])
def test_a_bias_of_no_known_family_is_evaluated_anew(attend: Callable[..., Tensor]) -> None:
    (layer,) = assert_ragged_equals_alone(toy(attend)).layers
    assert layer.proof.startswith("a mask of no known family: recomputed")


@pytest.mark.parametrize("change", [{"softcap": None}, {"scale": 0.36}, {"alibi_slopes": None}])
def test_these_comparisons_see_what_is_dropped(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a spec that lacks the feature gives other logits."""
    from dataclasses import replace

    from paged_attn.passes import replace_layers

    names = {"softcap": "softcap", "scale": "plain", "alibi_slopes": "ALiBi by key"}
    attend, kv_heads, _ = SPELLINGS[names[next(iter(change))]]
    made = replace_layers.AttentionSpec
    monkeypatch.setattr(replace_layers, "AttentionSpec", lambda **fields: replace(made(**fields), **change))
    with pytest.raises((AssertionError, RuntimeError)):
        assert_ragged_equals_alone(toy(attend, kv_heads))
