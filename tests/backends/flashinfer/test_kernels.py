"""Which of FlashInfer's kernels runs for which batch, and how large a workspace it gets."""

import dataclasses

import pytest

from paged_attn.attn_ops.batch.batch import ForwardMode
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.backends.attention.flashinfer import choose
from paged_attn.backends.attention.flashinfer.backend import FlashInferBackend
from paged_attn.backends.attention.flashinfer.kinds import Kind
from paged_attn.backends.attention.flashinfer.tables import parts_of
from tests.backends.flashinfer.cases import FRESH, KIND, MIN_WORKSPACE, MODES, make_case, spec_of
from tests.backends.flashinfer.fake_flashinfer import CALLS
from tests.backends.problems import run


def kernels(lengths, feature="plain", backend=None, **options):
    CALLS.clear()
    run(make_case(lengths, feature, **options), backend or FlashInferBackend())
    return list(CALLS)


def test_kernels_by_mode():
    assert kernels(MODES[ForwardMode.DECODE]) == ["decode"]
    assert kernels(FRESH) == ["ragged:fa2"]
    assert kernels(MODES[ForwardMode.EXTEND]) == ["paged:fa2"]
    assert kernels(FRESH, "sinks") == ["paged:fa2:sinks"]


@pytest.mark.parametrize("feature", ["gqa_4", "gqa_7", "window"])
def test_tensor_cores_decode_large_or_odd_groups_and_windows(feature):
    assert kernels(MODES[ForwardMode.DECODE], feature) == ["decode:fa2"]


def test_a_mixed_batch_runs_in_two_parts_if_its_decodes_stand_together():
    extending = [(4, 6), (0, 3)]
    assert kernels([(5, 1)] * 4 + extending) == ["decode", "paged:fa2"]
    assert kernels([(5, 1)] * 4 + [(0, 3), (0, 6)]) == ["decode", "ragged:fa2"]
    assert kernels(extending + [(5, 1)] * 4) == ["paged:fa2", "decode"]
    assert kernels([(5, 1)] * 3 + extending) == ["paged:fa2"]
    assert kernels([(5, 1), (4, 6)] * 4) == ["paged:fa2"]


def parts(lengths):
    return [(p.first, p.last, p.row, p.end, p.decode, p.fresh) for p in parts_of(make_case(lengths).batch)]


def test_parts():
    assert parts([(5, 1)] * 5) == [(0, 5, 0, 5, True, False)]
    assert parts([(5, 1)] * 4 + [(0, 1)]) == [(0, 5, 0, 5, True, False)]
    assert parts([(5, 1)] * 4 + [(4, 6), (0, 3)]) == [(0, 4, 0, 4, True, False), (4, 6, 4, 13, False, False)]
    assert parts([(0, 6), (0, 3)] + [(5, 1)] * 5) == [(0, 2, 0, 9, False, True), (2, 7, 9, 14, True, False)]
    assert parts([(0, 6), (2, 3)]) == [(0, 2, 0, 9, False, False)]


@pytest.mark.parametrize(
    ("lengths", "architecture", "expected"),
    [([8192], 90, "fa3"), ([8192], 80, "fa2"), ([8192], 100, "fa2"), ([8192], None, "fa2"), ([128], 90, "fa2"), ([512], 90, "fa2"),
     ([640], 90, "fa3"), ([1] * 5, 90, "fa3")],
)  # fmt: skip
def test_fa3_where_its_tiles_fill_the_gpu(lengths, architecture, expected):
    assert choose.prefill_kernel(KIND, lengths, architecture, 132) == expected


def test_a_bidirectional_window_needs_fa3():
    kind = Kind.of(spec_of("bidirectional", sliding_window=7))
    assert choose.prefill_kernel(kind, [2], 90, 132) == "fa3"
    for architecture, wanted in ((80, "auto"), (None, "auto"), (90, "fa2")):
        with pytest.raises(UnsupportedError, match=r"bidirectional layers with a window .* take another backend"):
            choose.prefill_kernel(kind, [2], architecture, 132, wanted)


def test_the_workspace_holds_the_splits_that_fa2_may_plan():
    """Sizes that its scheduler computes: heads * tiles * rows of a tile * (dim + 1) floats."""
    assert choose.workspace_bytes(KIND, 132) >= 32 * 33 * 128 * 129 * 4
    assert choose.workspace_bytes(dataclasses.replace(KIND, num_q_heads=128), 132) > MIN_WORKSPACE == 128 << 20
    assert choose.workspace_bytes(KIND, 132, num_rows=512) >= 32 * (128 + 511) * 16 * 129 * 4
