"""A mask's subgraph on concrete rows: which lengths, literals and inputs it is evaluated with, and what counts as visible."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.find.attention_site import SdpaScores
from paged_attn.passes.find.sdpa import find_sdpa
from paged_attn.passes.prove.mask_family import MaskFamily, draw, packed_variants
from paged_attn.passes.prove.mask_probe import MaskProbe, as_seen
from paged_attn.passes.prove.subgraph_probe import SCALES
from tests.passes.graphs import Traced, masked, trace
from tests.passes.prove.test_mask_proof import Mask, segments, window


def probe_of(mask: Mask) -> MaskProbe:
    def work(traced: Traced) -> MaskProbe:
        (site,) = find_sdpa(traced.gm.graph, traced.form)
        assert isinstance(site.scores, SdpaScores) and site.scores.mask is not None
        return MaskProbe(site.scores.mask, site.node, traced.form, traced.values, "layer at attend")

    probe: MaskProbe = trace(masked(mask), work).result
    return probe


def test_one_trace_serves_every_length() -> None:
    probe = probe_of(window("(k <= q) & (q - k < 8)"))
    for length in (2, 12, 30):
        assert np.array_equal(probe.run((length,), None, seed=0).visible, MaskFamily(True, window=8).matrix(length))


def test_a_packed_row_restarts_positions() -> None:
    mask = probe_of(segments).run((3, 1, 4), None, seed=0).visible
    assert np.array_equal(mask, packed_variants(MaskFamily(True), (3, 1, 4))["packed"])


def test_large_numbers_are_scaled_and_small_ones_are_not() -> None:
    probe = probe_of(window("(k <= q) & (q // 8192 == k // 8192) & (q - k <= 4095) & (q - k < 4096) & (q - k < 12)"))
    assert probe.literals == [4095, 4096, 8192]
    assert probe.images(SCALES[0]) == {4095: 7, 4096: 8, 8192: 13}
    assert np.array_equal(probe.run((40,), SCALES[0], seed=0).visible, MaskFamily(True, window=8, chunk=13).matrix(40))
    assert np.array_equal(
        probe.run((40,), SCALES[1], seed=0).visible, MaskFamily(True, window=11, chunk=16).matrix(40) & MaskFamily(True, 12).matrix(40)
    )
    assert np.array_equal(probe.run((40,), None, seed=0).visible, MaskFamily(True, window=12).matrix(40))


def test_too_many_large_numbers() -> None:
    text = " & ".join(f"(q - k < {n})" for n in (100, 200, 300, 400, 500))
    with pytest.raises(UnsupportedError, match=r"uses 5 large numbers \[100, 200, 300, 400, 500\]; at most 4"):
        probe_of(window(text)).images(SCALES[0])


def test_the_two_scales_tell_every_pair_of_numbers_apart() -> None:
    for scale in SCALES:
        assert list(scale) == sorted(scale) and min(b - a for a, b in itertools.pairwise(scale)) > 2
    assert not set(SCALES[0]) & set(SCALES[1])


def test_token_ids_differ_between_seeds() -> None:
    probe = probe_of(lambda ids, pos: (ids[:, None, :, None] == ids[:, None, None, :]) & (pos >= 0)[:, None, None, :])
    assert not np.array_equal(probe.run((20,), None, seed=0).visible, probe.run((20,), None, seed=1).visible)
    assert np.array_equal(probe.run((20,), None, seed=1).visible, probe.run((20,), None, seed=1).visible)


def test_the_mask_of_the_traced_call_itself() -> None:
    probe = probe_of(window("(k <= q) & (q - k < 4096)"))
    assert np.array_equal(as_seen(probe.evaluate_as_called(), 12, "here").visible, MaskFamily(True).matrix(12))


def test_additive_and_broadcast_masks() -> None:
    hidden = torch.tensor([[0.0, -torch.inf], [0.0, torch.finfo(torch.float32).min]])
    assert draw(as_seen(hidden, 2, "here").visible) == "#.\n#."
    assert draw(as_seen(hidden[None, None].half(), 2, "here").visible) == "#.\n#."
    assert draw(as_seen(torch.tensor([True, False]), 2, "here").visible) == "#.\n#."
    assert draw(as_seen(torch.tensor([[[[True], [False]]]]), 2, "here").visible) == "##\n.."


def test_what_an_additive_mask_adds() -> None:
    plain = as_seen(torch.tensor([[5.0, -torch.inf], [7.0, 7.0]]), 2, "here")
    assert plain.bias is None  # softmax does not see what a whole row shares
    biased = as_seen(torch.tensor([[[0.0, -torch.inf], [-1.0, 0.0]], [[0.0, -torch.inf], [-2.0, 0.0]]]), 2, "here")
    assert biased.bias is not None and biased.bias.tolist() == [[[0, 0], [-1, 0]], [[0, 0], [-2, 0]]]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(2, 3, dtype=torch.bool), r"shape \[2, 3\]"),
        (torch.tensor([[[True]], [[False]]]), "differs between heads"),
    ],
)
def test_not_a_visibility(mask: Tensor, words: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"layer at x: .*{words}"):
        as_seen(mask, 2, "layer at x")
