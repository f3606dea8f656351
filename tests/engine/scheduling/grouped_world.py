"""The `World` of a model with windows: every slot of every frame knows of which prefix it is, and a frame that is given back of none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paged_attn.attn_ops.kv.layer_groups import LayerGroup, Retention
from paged_attn.engine.memory.budget import StateSlots
from paged_attn.engine.memory.grouped_kv import GroupedKVManager
from paged_attn.engine.memory.kv_manager import KVManager
from paged_attn.engine.requests.request import Request
from tests.engine.scheduling.world import World

FULL = Retention()
CHOICES = (
    (FULL, Retention(3)),
    (FULL, Retention(5), Retention(chunk=4), Retention(chunk=4)),
    (Retention(4),),
    (Retention(2), Retention(7)),
    (FULL, FULL, Retention(1), Retention(window=6, chunk=9)),
)


class GroupedWorld(World):
    kv: GroupedKVManager

    def make_kv(self, num_pages: int, slots: StateSlots) -> KVManager:
        groups = [LayerGroup((index,), keeps) for index, keeps in enumerate(self.rng.choice(CHOICES))]
        frames = 1 + (num_pages - 1) * len(groups)
        kv = GroupedKVManager(
            groups, frames, self.page_size, self.config.prefix_cache, self.config.step_tokens, slots, self.states,  # type: ignore[arg-type]
            self.config.snapshot_interval,
        )  # fmt: skip
        give_back = kv.allocator.give_back

        def forgetting(pages: Any, groups: Any) -> None:
            gone = {int(kv.frames[group, page]) for group in groups for page in pages}
            give_back(pages, groups)
            for slot in [slot for slot in self.slots if slot[0] in gone]:
                del self.slots[slot]

        kv.allocator.give_back = forgetting  # type: ignore[method-assign]
        return kv

    def _read(self, request: Request, start: int) -> None:
        for index, group in enumerate(self.kv.groups):
            for position in range(group.keeps.first(start), start):
                held = self.slots.get(self._slot_in(request, position, index))
                assert held == self.prefixes[request][position], f"{request.id} reads what is not its own"

    def _write(self, request: Request, start: int, end: int) -> None:
        for index in range(len(self.kv.groups)):
            for position in range(start, end):
                slot = self._slot_in(request, position, index)
                assert slot[0] > 0, f"{request.id} has no frame to write to"
                self.slots[slot] = self.prefixes[request][position]

    def _slot_in(self, request: Request, position: int, group: int) -> tuple[int, int]:
        page, offset = self._slot(request, position)
        return int(self.kv.frames[group, page]), offset

    def check_pages(self, num_held: int) -> None:
        allocator = self.kv.allocator
        mapped = allocator.frames[allocator.frames > 0].tolist()
        assert len(set(mapped)) == len(mapped) == allocator.num_frames - 1 - allocator.num_free_frames
        assert allocator.in_use.tolist() == [int((of_group > 0).sum()) for of_group in allocator.frames]
        assert allocator.num_free_ids + num_held == allocator.num_pages - 1
        assert not any(allocator.frames[:, page].any() for page in allocator._free)

    def slots_of(self, pages: Iterable[int]) -> list[Any]:
        frames = self.kv.frames[:, list(pages)].ravel().tolist()
        return [(frame, offset) for frame in frames if frame for offset in range(self.page_size)]
