"""Decode steps divided in one launch: what the two kernels for any steps find, and fewer launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from paged_attn.attn_ops.batch.batch import GroupTable
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.kv.layer_groups import LayerGroup, Retention
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.by_group import by_group
from paged_attn.backends.attention.triton import work_partition
from paged_attn.backends.attention.triton.backend import TritonBackend
from paged_attn.backends.attention.triton.tiling import Tiling
from paged_attn.backends.attention.triton.work_partition import PartitionKind, WorkPartition, deal
from tests.backends.problems import make, spec_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEATURES = ["plain", "window", "bidirectional", "chunk", "window_chunk", "successive", "inter", "gqa_7"]
LENGTHS = st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1, 1, 1, 3])), min_size=1, max_size=20)


def kind_of(feature: str, item_cost: int, block_n: int) -> PartitionKind:
    spec = replace(spec_of("chunk"), chunk_part=feature) if feature in ("successive", "inter") else spec_of(feature)
    return PartitionKind.of(spec, "one", Tiling(16, block_n, 4, 2, 2, 2, item_cost=item_cost))


@settings(max_examples=15, deadline=None)
@given(
    lengths=LENGTHS,
    features=st.lists(st.sampled_from(FEATURES), min_size=1, max_size=4),
    costs=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    multiprocessors=st.integers(1, 9),
)
def test_one_launch_deals_what_two_deal(lengths: Any, features: list[str], costs: list[int], multiprocessors: int) -> None:
    """Kinds of their own numbers of programs, in pairs where their chunks allow it; also beside prompts."""
    if not any(new == 1 for _, new in lengths):
        lengths = [*lengths, (7, 1)]
    batch = make(lengths, spec_of("plain"), page_size=4).to(DEVICE).batch
    kinds = [kind_of(feature, cost, 8 << (cost & 1)) for feature, cost in zip(features, costs, strict=False)]
    assert all(kind.one_tile for kind in kinds)

    def partitions() -> list[WorkPartition]:
        made = [WorkPartition.allocate(kind, batch, multiprocessors + i, len(lengths)) for i, kind in enumerate(kinds)]
        for each in made:
            each.work.fill_(-9)
            each.counters.fill_(-9)
        return made

    together, alone = partitions(), partitions()
    deal(together, [batch] * len(together))
    for each, expected in zip(together, alone, strict=True):
        expected._deal_tiles(batch)
        rows, theirs = (one.work[: (one.programs + 1) * 16].view(-1, 16)[:, :11] for one in (each, expected))
        active = theirs[:, 4] > 0
        assert torch.equal(rows[active], theirs[active])
        assert (rows[~active][:, 4] <= 0).all() and (rows[:, 2] < each.kind.kv_heads).all()
        assert ((rows[:, 0] >= 0) & (rows[:, 0] < len(lengths))).all(), "a page table is looked at early, even for no blocks"
        assert torch.equal(each.counters, expected.counters)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, int]]]:
    """The kernels that divide work, with their grids; they run nothing."""
    seen: list[tuple[str, tuple[int, int]]] = []
    for name in ("_count", "_count_shared", "_deal", "_deal_decodes"):
        monkeypatch.setattr(work_partition, name, lambda key, grid, *_, name=name: seen.append((name, grid)))
    return seen


def grouped(*windows: int | None) -> tuple[Any, Any]:
    """A backend and its plan of a decode step whose layers have these windows, each a group of its own."""
    specs = tuple(AttentionSpec(2, 2, 16, 16, 0.5, sliding_window=window, kv_layer=i) for i, window in enumerate(windows))
    groups = tuple(LayerGroup((i,), Retention(window=window)) for i, window in enumerate(windows))
    pool = KVPool(specs, 20, 4, torch.float32, groups=groups)
    batch = make([(9, 1), (30, 1)], specs[0], page_size=4).batch
    batch = replace(batch, groups=(GroupTable(batch.slots, batch.page_table, batch.page_table_host),) * len(groups))
    backend = by_group(TritonBackend(), pool)
    return backend, backend.plan(batch, pool)


def test_two_kinds_of_layers_are_one_launch(launched: list[tuple[str, tuple[int, int]]]) -> None:
    backend, plan = grouped(None, 8)
    backend.plan_groups_in_graph([plan], model_follows=True)
    assert [(name, kinds) for name, (_, kinds) in launched] == [("_deal_decodes", 2)]


def test_groups_of_one_kind_share_a_partition(launched: list[tuple[str, tuple[int, int]]]) -> None:
    backend, plan = grouped(None, 8, 8, 8)
    backend.plan_in_graph(plan)
    assert [(name, kinds) for name, (_, kinds) in launched] == [("_deal_decodes", 2)]
    shares = [each.shares[0] for each in plan.plans]
    assert shares[1] is shares[2] is shares[3] is not shares[0]


@pytest.mark.parametrize("model_follows", [False, True])
def test_nothing_is_launched_between_the_plan_and_the_model(launched: list[Any], model_follows: bool) -> None:
    """Only before attention that reads the plan before it waits."""
    batch = make([(9, 1)], spec_of("plain"), page_size=4).batch
    kind = PartitionKind.of(spec_of("plain"), "one", Tiling(16, 16, 4, 2, 2, 2, early=True, first_block_early=True))
    partition = WorkPartition.allocate(kind, batch, 3, 1)
    partition.counters.fill_(5)
    deal([partition], [batch], model_follows)
    assert bool(partition.counters.any()) is model_follows
