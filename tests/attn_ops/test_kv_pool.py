"""Where the pool's tensors lie in memory, which pools are refused, and what is made once for each."""

import dataclasses

import pytest
import torch

from paged_attn.attn_ops.kv.kv_pool import KVPool, once_per_pool, page_elements
from paged_attn.attn_ops.specs.attention import AttentionSpec

PAGE_SIZE, NUM_PAGES = 4, 6
LAYERS = [
    AttentionSpec(4, 2, 8, 8, 1.0, kv_layer=0),
    AttentionSpec(4, 1, 6, 10, 1.0, kv_layer=1),
    AttentionSpec(8, 2, 8, 8, 1.0, kv_layer=0),
    AttentionSpec(3, 3, 5, 5, 1.0, kv_layer=3),
]


def pool(**changes) -> KVPool:
    return KVPool(**{"layers": LAYERS, "num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "dtype": torch.float32, **changes})


def test_shapes():
    made = pool()
    for index, spec in enumerate(LAYERS):
        assert made.key(index).shape == (NUM_PAGES, PAGE_SIZE, spec.num_kv_heads, spec.qk_head_dim)
        assert made.value(index).shape == (NUM_PAGES, PAGE_SIZE, spec.num_kv_heads, spec.v_head_dim)
    assert made.layers == tuple(LAYERS)
    assert (made.num_pages, made.page_size, made.dtype, made.device.type) == (NUM_PAGES, PAGE_SIZE, torch.float32, "cpu")


def test_a_page_holds_every_layer_k_then_v_and_nothing_else():
    """Numbering the storage shows where each view lies: page by page, layer by layer, K and then V, without gaps."""
    made = pool()
    made.storage.copy_(torch.arange(made.storage.numel()))
    for page in range(NUM_PAGES):
        parts = [t[page].flatten() for index in (0, 1, 3) for t in (made.key(index), made.value(index))]
        assert torch.equal(torch.cat(parts), made.storage[page * made.page_elements : (page + 1) * made.page_elements])


def test_one_allocation_with_the_page_stride_of_all_layers():
    made = pool()
    views = [made.key(i) for i in range(4)] + [made.value(i) for i in range(4)]
    assert {view.untyped_storage().data_ptr() for view in views} == {made.storage.untyped_storage().data_ptr()}
    assert {view.stride(0) for view in views} == {made.page_elements}
    assert all(view[0].is_contiguous() for view in views)
    for index in (0, 1, 3):
        assert made.value(index).storage_offset() == made.key(index).storage_offset() + made.key(index)[0].numel()


def test_sizes():
    made = pool(dtype=torch.bfloat16)
    by_hand = PAGE_SIZE * (2 * (8 + 8) + 1 * (6 + 10) + 3 * (5 + 5))
    assert page_elements(LAYERS, PAGE_SIZE) == made.page_elements == by_hand
    assert made.nbytes == NUM_PAGES * by_hand * 2


def test_a_layer_that_shares_kv_has_the_same_view_and_costs_nothing():
    made = pool()
    for view in (made.key, made.value):
        assert (view(2).data_ptr(), view(2).stride(), view(2).shape) == (view(0).data_ptr(), view(0).stride(), view(0).shape)
    made.key(0)[3, 2] = 7.0
    assert (made.key(2)[3, 2] == 7.0).all()
    assert page_elements(LAYERS, PAGE_SIZE) == page_elements([*LAYERS[:2], dataclasses.replace(LAYERS[3], kv_layer=2)], PAGE_SIZE)


def test_writing_one_layer_leaves_the_others():
    made = pool()
    made.key(1).fill_(1.0)
    assert made.storage.count_nonzero() == made.key(1).numel()
    assert not made.value(1).any() and not made.key(0).any() and not made.key(3).any()


def test_starts_as_zeros():
    assert not pool().storage.any()


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"num_pages": 1}, "num_pages=1"),
        ({"page_size": 0}, "page_size=0"),
    ],
)
def test_refusals(changes, got):
    with pytest.raises(ValueError, match=f"needs at least 2 pages.*got .*{got}"):
        pool(**changes)


@pytest.mark.parametrize("target", [3, 2, 9, -1])
def test_kv_is_shared_with_an_earlier_layer_only(target):
    layers = [LAYERS[0], dataclasses.replace(LAYERS[0], kv_layer=target, module="model.attn")]
    with pytest.raises(ValueError, match=rf"layer 1 \(model\.attn\) reads the KV of layer {target}; allowed are"):
        pool(layers=layers)


@pytest.mark.parametrize("change", [{"num_kv_heads": 1}, {"qk_head_dim": 4}, {"v_head_dim": 4}])
def test_kv_is_shared_between_equal_shapes_only(change):
    with pytest.raises(ValueError, match=r"layer 1 expects KV heads, qk and v dims .* but layer 0, whose KV it reads, has \(2, 8, 8\)"):
        pool(layers=[LAYERS[0], dataclasses.replace(LAYERS[0], **change)])


def test_what_is_made_for_a_pool_is_made_once_and_a_refusal_is_repeated():
    seen = []

    @once_per_pool
    def storage_of(given: KVPool) -> int:
        seen.append(given)
        if given.page_size != PAGE_SIZE:
            raise ValueError("refused")
        return given.storage.data_ptr()

    first, second, refused = pool(), pool(), pool(page_size=2)
    assert [storage_of(each) for each in (first, second, first)] == [each.storage.data_ptr() for each in (first, second, first)]
    for _ in range(2):
        with pytest.raises(ValueError, match="refused"):
            storage_of(refused)
    assert list(map(id, seen)) == list(map(id, (first, second, refused, refused)))
