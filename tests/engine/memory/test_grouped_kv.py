"""Sizes and books of pages with frames: groups of layers, the allocator, and how many requests fit in the same bytes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from paged_attn.attn_ops.kv.kv_pool import KVPool, page_elements
from paged_attn.attn_ops.kv.layer_groups import LayerGroup, Retention, group_layers
from paged_attn.attn_ops.kv.page_allocator import GroupedAllocator, OutOfPages
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.dual_chunk import DualChunkSpec
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.memory.budget import MemoryBudget, StateSlots, frames_of_request
from paged_attn.engine.memory.grouped_kv import GroupedKVManager
from paged_attn.engine.memory.kv_manager import KVManager
from tests.engine.scheduling.grouped_world import FULL, GroupedWorld
from tests.engine.scheduling.world import World

BF16, CUDA = torch.bfloat16, torch.device("cpu")


def layers_of(model_type: str, **shape: Any) -> list[AttentionSpec]:
    """Those that a config of transformers describes; checked elsewhere against what is proved from graphs."""
    config = AutoConfig.for_model(model_type, **shape)
    dim = config.head_dim
    windows = {"sliding_attention": {"sliding_window": config.sliding_window}} if "sliding_attention" in config.layer_types else {}
    windows["chunked_attention"] = {"chunk": getattr(config, "attention_chunk_size", None)}
    return [
        AttentionSpec(config.num_attention_heads, config.num_key_value_heads, dim, dim, 1.0, kv_layer=index, **windows.get(kind, {}))
        for index, kind in enumerate(config.layer_types)
    ]


GEMMA3_12B = {
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024,
    "sliding_window_pattern": 6, "max_position_embeddings": 131_072,
}  # fmt: skip
GPT_OSS_20B = {
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
    "max_position_embeddings": 131_072,
}  # fmt: skip
LLAMA4_SCOUT = {
    "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192,
    "max_position_embeddings": 10_485_760,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "shape", "sizes", "fit"),
    [
        ("gemma3_text", GEMMA3_12B, [8] * 6, (6, 30)),
        ("gpt_oss", GPT_OSS_20B, [12] * 2, (54, 108)),
        ("llama4_text", LLAMA4_SCOUT, [12] * 4, (13, 21)),
    ],
)
def test_requests_of_16000_tokens_that_fit_in_40_gib(
    model_type: str, shape: dict[str, Any], sizes: list[int], fit: tuple[int, int]
) -> None:
    """Of published shapes in bfloat16, by what sizes the pool and counts a request's pages."""
    layers, config = layers_of(model_type, **shape), EngineConfig(kv_memory_gib=40.0)
    groups = group_layers(layers, shape["max_position_embeddings"], config.page_size)
    assert [len(group.layers) for group in groups] == sizes
    before = (MemoryBudget(config, layers, BF16, CUDA).pages() - 1) // -(-16_000 // config.page_size)
    frames = MemoryBudget(config, layers, BF16, CUDA, groups).pages() - 1
    after = frames // frames_of_request(groups, 16_000, config.page_size)
    assert (before, after) == fit and after >= 1.5 * before
    page_bytes = page_elements(layers, config.page_size, groups) * BF16.itemsize
    assert frames * page_bytes <= 40 * 2**30 < (frames + 2) * page_bytes


class Gemma(GroupedWorld):
    """Two layers that keep all and four with a window of 8, as three groups of two; memory for 100 pages of all layers."""

    def make_kv(self, num_pages: int, slots: StateSlots) -> KVManager:
        groups = [LayerGroup((0, 1), FULL), LayerGroup((2, 3), Retention(8)), LayerGroup((4, 5), Retention(8))]
        return GroupedKVManager(groups, 3 * num_pages, 4, self.config.prefix_cache, self.config.step_tokens, slots)


def most_without_preemption(make: type[World]) -> int:
    """Of requests with 40 tokens and 60 new ones, all at once."""
    for count in range(1, 100):
        world = make(random.Random(0), 101, 4, overlap=False, stops=10**18, max_batch_tokens=32, prefix_cache=False)
        for index in range(count):
            world.add([1 + (index + position) % 2 for position in range(40)], 60)
        while world.requests:
            world.step()
        if world.scheduler.stats.preemptions:
            return count - 1
    raise AssertionError("nothing was ever preempted")


def test_more_requests_of_a_length_fit_in_the_same_bytes() -> None:
    """100 tokens in pages of 4: 25 frames of one group and 3 of each other, in place of 25 of each; they do not all end at once."""
    assert (most_without_preemption(World), most_without_preemption(Gemma)) == (4, 10)


def spec(kv_layer: int, window: int | None = None, heads: int = 2, **more: Any) -> AttentionSpec:
    return AttentionSpec(4, heads, 8, 8, 1.0, sliding_window=window, kv_layer=kv_layer, **more)


def test_layers_of_other_sizes_are_packed_by_their_bytes() -> None:
    layers = [spec(0, 4, heads=1), spec(1, 4, heads=1), spec(2, heads=4), spec(3, 4, heads=2), spec(4, 4, heads=4)]
    groups = group_layers(layers, 1000, 4)
    assert groups == (LayerGroup((2,), Retention()), LayerGroup((0, 1, 3), Retention(4)), LayerGroup((4,), Retention(4)))
    pool = KVPool(layers, 3, 4, torch.float32, groups=groups)
    assert pool.page_elements == 4 * 4 * 16 and pool.nbytes == 3 * pool.page_elements * 4
    assert [len(part.layers) for part in pool.parts] == [1, 3, 1]
    pool.key(3)[2].fill_(7.0)
    assert (pool.parts[1].key(2)[2] == 7.0).all() and pool.key(3).data_ptr() == pool.parts[1].key(2).data_ptr()
    assert int((pool.storage == 7.0).sum()) == 4 * 2 * 8


def test_a_layer_that_reads_anothers_kv_keeps_it() -> None:
    """The owner of a window and a reader that sees all: a family that keeps all."""
    layers = [spec(0, 4), spec(1, 4), spec(1), spec(3, 4), spec(3, 6), spec(5)]
    groups = group_layers(layers, 1000, 4)
    assert {(group.layers, group.keeps) for group in groups} == {
        ((1, 2), Retention()), ((5,), Retention()), ((0,), Retention(4)), ((3, 4), Retention(6)),
    }  # fmt: skip
    pool = KVPool(layers, 3, 4, torch.float32, groups=groups)
    assert pool.key(2).data_ptr() == pool.key(1).data_ptr() and [s.kv_layer for s in pool.parts[0].layers] == [0, 0]


DUAL = DualChunkSpec(4, 2, 8, 8, 1.0, chunk=4)


@pytest.mark.parametrize("layers", [[DUAL], [spec(0), spec(1)], [spec(0, 900), spec(1)], [spec(0, 4, causal=False), spec(1)]])
def test_nothing_is_grouped_where_that_saves_nothing(layers: list[AttentionSpec]) -> None:
    assert group_layers(layers, 1000, 4) == ()


@pytest.mark.parametrize("keeps", [Retention(1), Retention(5), Retention(chunk=6), Retention(window=5, chunk=9), Retention()])
def test_what_is_kept_is_what_the_mask_lets_through(keeps: Retention) -> None:
    """And never more pages than are said to be kept, wherever they begin."""
    for position in range(60):
        window, chunk = keeps.window or 99, keeps.chunk or 99
        seen = [j for j in range(position + 1) if position - window < j and position // chunk == j // chunk]
        assert keeps.first(position) == seen[0]
        for step in (1, 7):
            end = position + step
            assert -(-end // 4) - keeps.first(position) // 4 <= keeps.pages(end, 4, step)


def test_frames_are_given_back_one_group_at_a_time() -> None:
    allocator = GroupedAllocator(7, 4, 2)
    assert (allocator.num_usable, allocator.num_free) == (3, 3)
    pages = allocator.allocate(3)
    assert allocator.num_free == 0 and sorted(allocator.frames[:, pages].ravel().tolist()) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(OutOfPages, match="needed 1 KV pages, but only 0 are free"):
        allocator.allocate(1)
    allocator.give_back(pages[:2], [1])
    allocator.give_back(pages[:1], [1])  # again: it has none there
    assert (allocator.num_free, allocator.num_free_frames) == (1, 2)
    (more,) = allocator.allocate(1)
    allocator.fill_up(pages[0], more)
    assert allocator.frames[1, more] == 0 and allocator.frames[:, pages[0]].all()
    assert allocator.in_use.tolist() == [4, 2]
    allocator.free([*pages, more])
    assert (allocator.num_free, allocator.num_free_frames) == (3, 6) and not allocator.frames.any() and not allocator.in_use.any()
