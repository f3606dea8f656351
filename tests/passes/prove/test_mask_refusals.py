"""Masks that no family covers are recomputed from all tokens where they are causal; else they are refused: the message names the layer,
says why and draws the mask. Nothing is guessed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.specs.recompute import RecomputeSpec
from tests.passes.graphs import Toy, assert_ragged_equals_alone, masked, rewrite_of
from tests.passes.prove.test_mask_proof import Mask, arange, places, rows, tril, window


def per_head(ids: Tensor, pos: Tensor) -> Tensor:
    q, k = rows(ids)
    return (k <= q) & (q - k < torch.arange(1, 5)[:, None, None] * 3)


def per_head_ahead(ids: Tensor, pos: Tensor) -> Tensor:
    q, k = rows(ids)
    head = torch.arange(4)[:, None, None]
    return (k <= q + head) & (q - k < (head + 1) * 3)


def bias_of_both(ids: Tensor, pos: Tensor) -> Tensor:
    q, k = rows(ids)
    return torch.where(k <= q, torch.sin(k * q * 0.25), float("-inf"))


def soft(ids: Tensor, pos: Tensor) -> Tensor:
    return torch.where(arange(ids, pos), 0.0, -8.0)


def padding_token(ids: Tensor, pos: Tensor) -> Tensor:
    return tril(ids, pos) & (ids != 3)[:, None, None, :]


def rare_token(ids: Tensor, pos: Tensor) -> Tensor:
    return tril(ids, pos) & (ids != 50256)[:, None, None, :]


def window_by_distance_on_packed_rows(ids: Tensor, pos: Tensor) -> Tensor:
    q, k = places(pos)
    return tril(ids, pos) & ((q - k).abs() < 8)


def counts_segments(ids: Tensor, pos: Tensor) -> Tensor:
    segment = (pos == 0).cumsum(-1)
    return tril(ids, pos) & ((segment[:, None, :, None] - segment[:, None, None, :]) < 2)


def random(ids: Tensor, pos: Tensor) -> Tensor:
    return (torch.rand(ids.shape[1], ids.shape[1]) > 0.5).tril() | torch.eye(ids.shape[1], dtype=torch.bool)


def bit_reversed_chunks(ids: Tensor, pos: Tensor) -> Tensor:
    q, k = rows(ids)
    return (k <= q) & ((q >> 13) == (k >> 13))


def small_steps(ids: Tensor, pos: Tensor) -> Tensor:
    q, k = rows(ids)
    return (k <= q) & (q // 20 // 20 == k // 20 // 20)


def bias_of_short_calls(ids: Tensor, pos: Tensor) -> Tensor:
    q, k = rows(ids)
    return (k - q) * 0.5 * max(0, 5 - ids.shape[1] // 20) + torch.where(k <= q, 0.0, float("-inf"))


REFUSED: dict[str, tuple[Mask, str]] = {
    "random": (random, "matches no known family"),
    "prefix-LM": (window("(k <= q) | (k < 4)"), "matches no known family"),
    "soft": (soft, r"holds values besides 0 and -inf \(from -8 to 0\)"),
    "bias of short calls": (bias_of_short_calls, "a bias that is there on 41 tokens but not on 609"),
    "padding token": (padding_token, "matches no known family"),
    "rare token": (rare_token, "matches no known family"),
    "differs per head, and sees ahead": (per_head_ahead, r"differs between heads"),
    "anticausal": (window("k >= q"), "matches no known family"),
    "lopsided window": (window("((q - k) * 2 < 16 + (k % 2)) & (k - q < 8)"), "matches no known family"),
    "window that grows": (lambda ids, pos: tril(ids, pos).triu(-(ids.shape[1] // 3)), "is 20 and 23 on two probes"),
}  # fmt: skip


RECOMPUTED: dict[str, Mask] = {
    "differs per head": per_head,
    "bias of query and key": bias_of_both,
    "dilated": window("(k <= q) & ((q - k) % 2 == 0)"),
    "block sparse": window("(k <= q) & ((q // 4 == k // 4) | (k % 8 == 0))"),
    "sink and window": window("(k <= q) & ((q - k < 8) | (k == 0))"),
    "strictly below": window("k < q"),
    "window by distance on packed rows": window_by_distance_on_packed_rows,
    "window over segments": counts_segments,
    "window far from its number": window("(k <= q) & (q - k < 4096 + (0 * q - 5))"),
    "sum of numbers": window("(k <= q) & (k + 4096 > q + 100)"),
    "product of numbers": window("(k <= q) & (q // 64 // 128 == k // 64 // 128)"),
    "product of small numbers": small_steps,
    "window in a shift": bit_reversed_chunks,
    "window in a buffer": window("(k <= q) & (q - k < buffer)", buffer=torch.tensor(4096)),
    "window in a list of them": window("(k <= q) & (q - k < buffer[0])", buffer=torch.tensor([4096, 8])),
    "window in a fraction": window("(k <= q) & (q - k < 4095.5)"),
    "chunk in a reciprocal": window("(k <= q) & (torch.floor(q * 0.0001220703125) == torch.floor(k * 0.0001220703125))"),
    "window that nothing shows": window("(k <= q) & (q.clamp(max=4096) - k < 9000)"),
}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputed(name: str) -> None:
    result = assert_ragged_equals_alone(masked(RECOMPUTED[name]))
    assert isinstance(result.specs[0], RecomputeSpec)
    assert result.layers[0].proof.startswith("a mask of no known family: recomputed from each request's history")


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    mask, why = REFUSED[name]
    with pytest.raises(UnsupportedError, match=why) as caught:
        rewrite_of(masked(mask))
    message = str(caught.value)
    assert message.startswith("layer at attend: ")
    drawn = [line for line in message.splitlines() if line and not set(line) - {"#", "."}]
    assert len(drawn) >= 16 and all(len(line) == 16 for line in drawn), message


def test_the_two_heads_that_differ_are_both_drawn() -> None:
    with pytest.raises(UnsupportedError) as caught:
        rewrite_of(masked(per_head_ahead))
    message = str(caught.value)
    assert "Head 0 (query = line, key = column):\n#....." in message and "and head 1:\n##...." in message
    first, second = ([line for line in part.splitlines() if line[:1] in "#." and line] for part in message.split("and head 1:"))
    assert first[5].startswith("...###.") and second[5].startswith("#######.")


def test_a_long_table_of_many_heads_is_too_much_to_look_at() -> None:
    """Every third key, under a bias of each head's own that a table of 2100 distances holds."""
    table = torch.randn(40, 2100)

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        apart = pos[0][:, None] - pos[0]
        mask = torch.where((apart >= 0) & (apart % 3 == 0), table[:, apart.clamp(min=0)], -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, mask[None], enable_gqa=True)

    with pytest.raises(UnsupportedError, match="no known family"):
        rewrite_of(Toy(attend, heads=40))
