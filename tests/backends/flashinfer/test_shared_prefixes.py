"""A prefix that all decodes share is attended to once, where that is right and pays."""

import dataclasses

import numpy as np
import pytest

from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.backends.attention.flashinfer import choose
from paged_attn.backends.attention.flashinfer.backend import FlashInferBackend
from paged_attn.backends.attention.flashinfer.tables import Part, shared_pages
from tests.backends.agreeing import REFERENCE, agree
from tests.backends.flashinfer.cases import F16, KIND, shared_case
from tests.backends.flashinfer.fake_flashinfer import CALLS
from tests.backends.problems import LAYER, STRIDES, close, copy_of, new_output, run


@pytest.mark.parametrize("lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("feature", ["plain", "softcap", "gqa_7", "bidirectional"])
def test_a_shared_prefix_is_attended_to_once(feature, lse, eager_cascade, backend):
    agree(shared_case(feature), backend, lse=lse)
    assert CALLS[-2:] == ["paged:fa2", "merge"] and CALLS[-3].startswith("decode")


@pytest.mark.parametrize("strides", STRIDES)
def test_a_cascade_writes_any_output(strides, eager_cascade, backend):
    case = shared_case(extra_rows=1)
    expected, _ = run(copy_of(case), REFERENCE)
    output = new_output(case, strides)
    with ForwardContext(case.batch, case.pool, backend):
        UNIFIED_ATTENTION(case.query, case.key, case.value, output, LAYER, True)
    close(output, expected, F16)
    assert "merge" in CALLS


def test_a_shared_prefix_within_a_mixed_batch(eager_cascade, backend):
    agree(shared_case(lengths=[(40, 1), (33, 1), (37, 1), (36, 1), (39, 6)]), backend, lse=True)
    assert CALLS == ["decode", "paged:fa2", "merge", "paged:fa2"]


@pytest.mark.parametrize("feature", ["window", "sinks"])
def test_no_cascade_where_it_would_be_wrong(feature, eager_cascade, backend):
    agree(shared_case(feature), backend)
    assert "merge" not in CALLS


def test_the_switch_and_the_thresholds(eager_cascade, monkeypatch):
    case = shared_case()
    for backend, limit, expected in (
        (FlashInferBackend(cascade=False), 4, False),
        (FlashInferBackend(), 4, True),
        (FlashInferBackend(), 33, False),
    ):
        CALLS.clear()
        monkeypatch.setattr(choose, "CASCADE_TOKENS", limit)
        agree(case, backend)
        assert ("merge" in CALLS) == expected


def test_without_a_host_table_nothing_is_looked_for(eager_cascade, backend):
    case = shared_case()
    case.batch = dataclasses.replace(case.batch, page_table_host=None)
    agree(case, backend)
    assert "merge" not in CALLS


def test_where_it_pays():
    assert choose.cascade_pays(KIND, 16, 1024)
    assert not choose.cascade_pays(KIND, 15, 1024) and not choose.cascade_pays(KIND, 16, 1023)
    assert not choose.cascade_pays(dataclasses.replace(KIND, num_q_heads=128), 16, 1024), (
        "the merging kernel has one block of threads per row"
    )


def shared_count(tables, seq_lens, page_size=4):
    class Host:
        page_table_host = np.array(tables, np.int32)
        seq_lens_host = tuple(seq_lens)

    Host.page_size = page_size
    return shared_pages(Host, Part(0, len(tables), 0, len(tables), True, False))


def test_shared_pages():
    assert shared_count([[7, 8, 9], [7, 8, 5]], [12, 12]) == 2
    assert shared_count([[7, 8, 9], [7, 8, 9]], [12, 12]) == 2, "the last token's page stays each request's own"
    assert shared_count([[7, 8, 0], [7, 8, 9]], [8, 12]) == 1
    assert shared_count([[7, 8, 0], [7, 8, 9]], [9, 12]) == 2
    assert shared_count([[1, 8, 9], [7, 8, 9]], [12, 12]) == 0
    assert shared_count([[7, 5, 9, 1], [7, 8, 9, 2]], [16, 16]) == 1
    assert shared_count([[7]], [4]) == 0
