"""Masks in many spellings are proved to the family that they are, with the numbers that the model has in its code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.specs.recompute import RecomputeSpec
from paged_attn.passes.prove import attention
from paged_attn.passes.prove.mask_probe import MaskProbe
from paged_attn.passes.prove.mask_proof import MaskProof, prove
from paged_attn.passes.runner import rewrite
from tests.passes.graphs import Toy, assert_ragged_equals_alone, masked, rewrite_of, trace

Mask = Callable[[Tensor, Tensor], Tensor]
FINFO_MIN = torch.finfo(torch.float32).min


def rows(ids: Tensor) -> tuple[Tensor, Tensor]:
    index = torch.arange(ids.shape[1])
    return index[:, None], index[None, :]


def places(pos: Tensor) -> tuple[Tensor, Tensor]:
    return pos[:, None, :, None], pos[:, None, None, :]


def square(ids: Tensor, value: float | bool, dtype: torch.dtype) -> Tensor:
    return torch.full((ids.shape[1], ids.shape[1]), value, dtype=dtype)


def tril(ids: Tensor, pos: Tensor) -> Tensor:
    return torch.tril(square(ids, True, torch.bool))


def arange(ids: Tensor, pos: Tensor) -> Tensor:
    q, k = rows(ids)
    return k <= q


def by_position(ids: Tensor, pos: Tensor) -> Tensor:
    q, k = places(pos)
    return ~(k > q)


def finfo_min(ids: Tensor, pos: Tensor) -> Tensor:
    return square(ids, FINFO_MIN, torch.float32).triu(diagonal=1)[None, None]


def minus_infinity(ids: Tensor, pos: Tensor) -> Tensor:
    mask = torch.zeros(ids.shape[1], ids.shape[1])
    mask.masked_fill_(torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu_(1), float("-inf"))
    return mask


def ten_thousand(ids: Tensor, pos: Tensor) -> Tensor:
    return (1.0 - tril(ids, pos).float()) * -10000.0


def where(ids: Tensor, pos: Tensor) -> Tensor:
    return torch.where(arange(ids, pos), 0.0, FINFO_MIN)


def written_by_slice(ids: Tensor, pos: Tensor) -> Tensor:
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool)
    mask[:, :, :, :] = tril(ids, pos)
    return mask


def segments(ids: Tensor, pos: Tensor) -> Tensor:
    segment = (pos == 0).cumsum(-1)
    return arange(ids, pos) & (segment[:, None, :, None] == segment[:, None, None, :])


def segments_by_difference(ids: Tensor, pos: Tensor) -> Tensor:
    start = torch.diff(pos, prepend=pos[:, :1] - 1, dim=-1) != 1
    segment = start.cumsum(-1)
    return (segment[:, None, :, None] == segment[:, None, None, :]) & tril(ids, pos)


def bidirectional(ids: Tensor, pos: Tensor) -> Tensor:
    return torch.zeros(ids.shape[1], ids.shape[1])


def window(text: str, rows_of: Callable[..., tuple[Tensor, Tensor]] = places, **names: Tensor) -> Mask:
    """q, k are positions; `text` is compiled into the mask that Dynamo traces."""
    function = eval(f"lambda q, k: {text}", {"torch": torch, **names})

    def mask(ids: Tensor, pos: Tensor) -> Tensor:
        q, k = rows_of(pos if rows_of is places else ids)
        return function(q, k)

    return mask


def banded(diagonal: int) -> Mask:
    return lambda ids, pos: square(ids, True, torch.bool).tril().triu(diagonal=diagonal)


def banded_in_place(diagonal: int) -> Mask:
    return lambda ids, pos: square(ids, True, torch.bool).tril_().triu_(diagonal)


SPELLINGS: dict[str, tuple[Mask, str]] = {
    "tril": (tril, "causal"), "arange": (arange, "causal"), "by position": (by_position, "causal"), "finfo.min": (finfo_min, "causal"),
    "-inf, in place": (minus_infinity, "causal"), "-10000": (ten_thousand, "causal"), "where": (where, "causal"),
    "written by slice": (written_by_slice, "causal"), "segments": (segments, "causal"),
    "segments by diff": (segments_by_difference, "causal"),
    "zeros": (bidirectional, "bidirectional"),
    "small window": (window("(k <= q) & (q - k < 8)"), "causal & window 8"),
    "window of 1": (window("(k <= q) & (q - k < 1)"), "causal & window 1"),
    "small window on rows": (window("(k <= q) & (k > q - 8)", rows), "causal & window 8"),
    "small band": (banded(-7), "causal & window 8"),
    "small chunk": (window("(k <= q) & (q // 8 == k // 8)"), "causal & chunk 8"),
    "both, small": (window("(k <= q) & (q // 8 == k // 8) & (q - k < 5)"), "causal & window 5 & chunk 8"),
    "window 4096": (window("(k <= q) & (q - k < 4096)"), "causal & window 4096"),
    "window 4096, <= 4095": (window("(k <= q) & (q - k <= 4095)"), "causal & window 4096"),
    "window 4097, <= 4096": (window("(k <= q) & (q - k <= 4096)"), "causal & window 4097"),
    "window 4096, k > q - 4096": (window("(k <= q) & (k > q - 4096)", rows), "causal & window 4096"),
    "window 4095, distance + 1": (window("(k <= q) & (q - k + 1 < 4096)"), "causal & window 4095"),
    "window 4096, negative": (window("(k - q > -4096) & (k - q <= 0)"), "causal & window 4096"),
    "window 4096, not": (window("~((k > q) | (q - k >= 4096))"), "causal & window 4096"),
    "window 4096, band": (banded(-4095), "causal & window 4096"),
    "window 4096, band in place": (banded_in_place(-4095), "causal & window 4096"),
    "window 4096, as a tensor": (window("(k <= q) & (q - k < torch.tensor(4096))"), "causal & window 4096"),
    "window 4096, as a float": (window("(k <= q) & ((q - k).float() < 4096.0)"), "causal & window 4096"),
    "window 33": (window("(k <= q) & (q - k < 33)"), "causal & window 33"),
    "window 1000": (window("(k <= q) & (q - k < 1000)"), "causal & window 1000"),
    "chunk 8192": (window("(k <= q) & (q // 8192 == k // 8192)"), "causal & chunk 8192"),
    "chunk 8192, on rows": (window("(k <= q) & (q // 8192 == k // 8192)", rows), "causal & chunk 8192"),
    "chunk 8192, div": (window("(k <= q) & (torch.div(q, 8192, rounding_mode='floor') == torch.div(k, 8192, rounding_mode='floor'))"),
                        "causal & chunk 8192"),
    "symmetric window": (window("(q - k).abs() < 8"), "bidirectional & window 8 & window ahead 8"),
    "symmetric window 4096": (window("(q - k).abs() <= 4096"), "bidirectional & window 4097 & window ahead 4097"),
    "lopsided window": (window("(q - k < 4096) & (k - q < 1000)"), "bidirectional & window 4096 & window ahead 1000"),
    "window 4096 & chunk 8192": (window("(k <= q) & (q // 8192 == k // 8192) & (q - k < 4096)"), "causal & window 4096 & chunk 8192"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_each_spelling(name: str) -> None:
    mask, words = SPELLINGS[name]
    (report,) = rewrite_of(masked(mask)).layers
    spec = report.spec
    named = (("window", spec.sliding_window), ("window ahead", spec.window_ahead), ("chunk", spec.chunk))
    limits = [f"{what} {value}" for what, value in named if value is not None]
    assert " & ".join(["causal" if spec.causal else "bidirectional", *limits]) == words
    assert "7 probes" in report.proof and words in report.proof


@pytest.mark.parametrize("name", ["tril", "segments", "small window", "small window on rows", "small chunk", "both, small", "-10000"])
def test_the_proved_family_gives_each_prompt_its_own_logits(name: str) -> None:
    assert_ragged_equals_alone(masked(SPELLINGS[name][0]))


@pytest.mark.parametrize("tokens", [200, 60, 33, 31])
def test_a_mask_read_from_a_stored_table_is_evaluated_over_its_length(tokens: int) -> None:
    table = torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(-149)  # no number of the graph says 150
    module = masked(lambda ids, pos: table[pos[0][:, None], pos[0][None, :]])
    if tokens > 31:
        result = rewrite_of(module)
        assert (result.specs[0].sliding_window, result.max_positions) == (150 if tokens == 200 else None, tokens)
    else:
        with pytest.raises(UnsupportedError, match="table of 31 positions; a proof needs 32"):
            rewrite_of(module)


def attending_twice(change: Callable[[Tensor], object]) -> Toy:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        mask = tril(ids, pos)
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        change(mask)
        return F.scaled_dot_product_attention(out, k, v, mask, enable_gqa=True)

    return Toy(attend)


@pytest.mark.parametrize("tokens", [128, 2048])
def test_a_bias_off_the_end_of_a_stored_table(tokens: int) -> None:
    """MPT's own code stores ALiBi for all its positions, and a call reads as many off the end as it has tokens."""
    stored = torch.arange(1 - tokens, 1).float() * torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(1, 4, 1, 1)

    def bias(ids: Tensor, pos: Tensor) -> Tensor:
        taken = stored[:, :, :, max(0, stored.shape[-1] - ids.shape[1]) :]
        return taken.masked_fill(tril(ids, pos).logical_not(), FINFO_MIN)

    result = assert_ragged_equals_alone(masked(bias))
    assert result.layers[0].spec.alibi_slopes is not None and result.max_positions == tokens


def cut_from_parts(ids: Tensor, pos: Tensor) -> Tensor:
    """All keys up to the thousandth. Only sizes say so, which are numbers of tables."""
    seen = torch.cat([torch.ones(2048, 1000, dtype=torch.bool), torch.zeros(2048, 1048, dtype=torch.bool)], 1).tril()
    return seen[: ids.shape[1], : ids.shape[1]]


def test_a_table_that_is_made_of_parts_is_evaluated_over_its_length() -> None:
    assert isinstance(rewrite_of(masked(cut_from_parts)).specs[0], RecomputeSpec)


def test_a_table_of_parts_that_shows_later_tokens_far_on_is_refused() -> None:
    """Causal up to the thousandth key; of those behind it only the ones ahead are seen."""

    def mask(ids: Tensor, pos: Tensor) -> Tensor:
        far = torch.cat([torch.zeros(2048, 1000, dtype=torch.bool), torch.ones(2048, 1048, dtype=torch.bool)], 1).triu(1)
        return cut_from_parts(ids, pos) | far[: ids.shape[1], : ids.shape[1]]

    with pytest.raises(UnsupportedError):
        rewrite_of(masked(mask))


@pytest.mark.parametrize("end", [128, 2048])
def test_a_table_that_each_call_makes_and_cuts(end: int) -> None:
    result = rewrite_of(masked(lambda ids, pos: torch.ones(end, end, dtype=torch.bool).tril()[: ids.shape[1], : ids.shape[1]]))
    assert (result.specs[0].causal, result.max_positions) == (True, end)


def test_sizes_of_more_tokens_than_a_probe_may_have_are_no_ends() -> None:
    """A table that is looked up, and beside it a tensor too long for scores of as many tokens."""

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        seen = (torch.arange(500)[:, None] >= torch.arange(500))[pos[0][:, None], pos[0]]
        scores = q @ k.repeat_interleave(2, 1).mT + torch.where(seen, 0.0, FINFO_MIN) + torch.zeros(150000, 1)[:1]
        return scores.softmax(-1) @ v.repeat_interleave(2, 1)

    with pytest.raises(UnsupportedError, match="its mask cannot be made for 609 tokens"):
        rewrite_of(Toy(attend))


def test_layers_that_share_a_mask_share_its_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = []

    def counted(probe: MaskProbe, max_positions: int | None) -> MaskProof:
        proofs.append(probe)
        return prove(probe, max_positions)

    monkeypatch.setattr(attention, "prove", counted)
    assert [spec.causal for spec in rewrite_of(attending_twice(lambda mask: None)).specs] == [True, True]
    assert len(proofs) == 1


def test_a_mask_that_is_written_in_place_between_two_layers_is_proved_for_each() -> None:
    result = assert_ragged_equals_alone(attending_twice(lambda mask: mask.triu_(-7)))
    assert [spec.sliding_window for spec in result.specs] == [None, 8]


def test_the_models_own_tensors_stay_as_they_are() -> None:
    table = torch.ones(200, 200, dtype=torch.bool)

    def mask(ids: Tensor, pos: Tensor) -> Tensor:
        table.tril_()
        return table[pos[0][:, None], pos[0][None, :]]

    traced = trace(masked(mask), lambda t: (table.fill_(True), rewrite(t.gm, t.args, None), table.all().item())[1:])
    result, untouched = traced.result
    assert result.specs[0].causal and untouched


def test_slopes_written_out_as_a_tensor() -> None:
    """Baichuan2-13B makes its mask in its first call, with slopes as numbers of Python, and raises -inf to the least number."""

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625])
        bias = slopes.unsqueeze(1).unsqueeze(1) * torch.arange(1024) + torch.full((1024, 1024), float("-inf")).triu(1)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = q @ k.transpose(-1, -2) / 8**0.5 + bias[:, : ids.shape[1], : ids.shape[1]]
        return torch.max(scores, torch.tensor(FINFO_MIN)).softmax(-1) @ v

    assert assert_ragged_equals_alone(Toy(attend)).layers[0].spec.alibi_slopes == (0.25, 0.0625, 0.015625, 0.00390625)
