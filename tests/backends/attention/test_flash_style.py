"""What the backends around FlashAttention's kernels share."""

import dataclasses

import pytest
import torch

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.flash_style import check_pool, for_kernel, kernel_takes, window_of
from tests.backends.problems import spec_of

BF16 = torch.bfloat16
TENSOR = torch.arange(1024, dtype=torch.float32).to(BF16)


def rows(row: int, head: int, last: int = 1, offset: int = 0):
    return TENSOR.as_strided((5, 4, 8), (row, head, last), offset)


@pytest.mark.parametrize(
    "tensor, fits",
    [
        (rows(32, 8), True),
        (rows(8, 40), True),
        (rows(40, 8), True),
        (rows(35, 8), False),
        (rows(64, 12), False),
        (rows(32, 8, offset=3), False),
        (rows(32, 8, offset=8), True),
        (rows(64, 16, last=2), False),
        (rows(32, 8).float(), False),
        (rows(32, 8).half(), False),
    ],
)
def test_what_a_kernel_takes_as_it_is(tensor, fits):
    assert kernel_takes(tensor, BF16) is fits
    taken = for_kernel(tensor, BF16)
    assert (taken is tensor) is fits and kernel_takes(taken, BF16)
    assert torch.equal(taken, tensor.to(BF16))


@pytest.mark.parametrize(
    "change, window",
    [
        ({}, (-1, 0)),
        ({"sliding_window": 5}, (4, 0)),
        ({"sliding_window": 1}, (0, 0)),
        ({"causal": False}, (-1, -1)),
        ({"causal": False, "sliding_window": 5}, (4, -1)),
    ],
)
def test_our_window_holds_the_query_itself_and_theirs_does_not_count_it(change, window):
    assert window_of(dataclasses.replace(spec_of(), **change)) == window


class OtherLayer(AttentionSpec):
    """One that no backend runs, such as `RecomputeSpec`."""

    by_backend = False


@pytest.mark.parametrize("page_size, fits", [(1, False), (4, False), (8, True), (16, True)])
def test_a_layer_of_another_kind_may_shift_the_others(page_size, fits):
    other = OtherLayer(1, 1, 33, 0, 1.0, kv_layer=0)
    pool = KVPool([other, dataclasses.replace(spec_of(), kv_layer=1)], 4, page_size, BF16)
    check_pool(KVPool([spec_of(layer=0)], 4, page_size, BF16), "fa3")
    if fits:
        return check_pool(pool, "fa3")
    with pytest.raises(
        UnsupportedError, match=r"fa3 loads 8 numbers at a time, and layer 1's lie at .* a page size that is a multiple of 8"
    ):
        check_pool(pool, "fa3")
