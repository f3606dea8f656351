"""Divides one memory budget between KV pages and recurrent states, by what a request needs of each.

The length of requests is not known beforehand. Whatever its length, a request takes one state of s bytes. Its pages take between `least`
(one token) and `most` bytes (the longest request). If each slot is given e bytes of pages, short requests run out of slots, and long ones
out of pages. Relative to a division made for requests of that length, so many fit:

    the shortest: (s + least) / (s + e)        the longest: e / most * (s + most) / (s + e)

The smaller of the two is largest where they are equal:

    e = most * (s + least) / (most + s)

So a hybrid model with long requests divides memory about evenly. One with few positions gets the pages that these can fill. A model
without attention uses all of the memory for states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import page_elements
from paged_attn.attn_ops.kv.layer_groups import LayerGroup, page_bytes_ratio
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.recurrent import RecurrentSpec, slot_bytes
from paged_attn.engine.config import EngineConfig

CPU_KV_GIB = 0.25
GPU_KV_SHARE = 0.8
BESIDE_PAGES = 0.5  # least share of the memory that states get if the number of pages is given
TOKENS_WITHOUT_KV = 1 << 20
RESERVE = 16  # 1/16 of the slots is reserved for the prefix cache, so that shared prefixes are found even if all other slots are in use
MIB = 2**20


class StateSlots(NamedTuple):
    """Slots of recurrent state, including slot 0, for requests and for states that the prefix cache keeps.

    kept: the most slots of the cache; reserved: how many of those are not evicted for requests.
    """

    total: int
    kept: int
    reserved: int = 0

    @property
    def most_running(self) -> int:
        """Requests that can run at the same time."""
        return max(self.total - 1, 0)


NO_STATE = StateSlots(0, 0)


@dataclass(frozen=True)
class MemoryNeeds:
    """Memory that a model needs for KV and states.

    slot: bytes of one request's recurrent state; 0 without recurrent layers.
    page: bytes of one page of the pool, which holds all layers or one group of them; 0 without attention.
    least, most: number of pages of a request of one token, and of the longest request (None: no limit).
    """

    slot: int
    page: int
    least: int
    most: int | None

    @property
    def pages_per_slot(self) -> float:
        """Bytes of pages for each slot of state: e in the module's docstring."""
        least = self.least * self.page
        if self.most is None:
            return self.slot + least
        most = self.most * self.page
        return most * (self.slot + least) / (most + self.slot) if most else 0.0


def _pages_of(groups: Sequence[LayerGroup], num_tokens: int, config: EngineConfig) -> int:
    if not groups:
        return -(-num_tokens // config.page_size)
    return frames_of_request(groups, num_tokens, config.page_size, config.step_tokens)


def frames_of_request(groups: Sequence[LayerGroup], num_tokens: int, page_size: int, step: int = 1) -> int:
    """The most frames that a request of `num_tokens` tokens takes, if its steps compute `step` tokens."""
    return sum(group.keeps.pages(num_tokens, page_size, step) for group in groups)


class MemoryBudget:
    """Computes the number of state slots (`slots`, at creation) and of pages (`pages`, once the states have been allocated).

    Args:
        layers, dtype, groups: of the KV pool.
        recurrent: of the state pool; empty for a model without states.
        longest: the most tokens of a request; None: no limit.
        chunks: whether every recurrent layer can process several tokens from a state. Otherwise, what follows a reused prefix runs token by
            token, slower than the whole prompt at once; states are then kept only if requested.
        agree: turns this process's number into that of all ranks, the minimum.

    Attributes:
        slots: of recurrent state.

    Raises:
        UnsupportedError: not one request fits; the message shows the arithmetic.
    """

    def __init__(
        self,
        config: EngineConfig,
        layers: Sequence[AttentionSpec],
        dtype: torch.dtype,
        device: torch.device,
        groups: Sequence[LayerGroup] = (),
        recurrent: Sequence[RecurrentSpec] = (),
        longest: int | None = None,
        chunks: bool = True,
        agree: Callable[[int], int] = int,
    ) -> None:
        self.config, self.layers, self.groups, self.device = config, tuple(layers), tuple(groups), device
        page = page_elements(layers, config.page_size, groups) * dtype.itemsize
        most = None if longest is None else _pages_of(groups, longest, config)
        self.needs = MemoryNeeds(slot_bytes(recurrent), page, _pages_of(groups, 1, config), most)
        self.slots = NO_STATE
        if recurrent:
            self.slots = self._state_slots(chunks, agree)

    @property
    def state_bytes(self) -> int:
        return self.slots.total * self.needs.slot

    def pages(self, kept_free: int = 0) -> int:
        """Pages of the pool, including page 0: as configured, or as many as fit beside the states, but with states no more than all slots
        can fill.

        With groups of layers a page holds one group; the setting `num_pages` counts pages of all layers and is converted to as many bytes.

        Args:
            kept_free: bytes of free memory to leave for something else, such as graphs.

        Raises:
            UnsupportedError: too few pages fit (two, or one for each group plus one); the message shows the arithmetic.
        """
        if self.config.num_pages is not None:
            return self._configured_pages(self.config.num_pages)
        if self.needs.page == 0:  # no attention: a page is only a count of tokens
            return 1 + -(-TOKENS_WITHOUT_KV // self.config.page_size)
        memory = self._bytes(kept_free, taken=self.state_bytes) - self.state_bytes
        pages = int(memory // self.needs.page)
        if pages < (least := 1 + self.needs.least):
            raise UnsupportedError(
                f"{memory / MIB:.1f} MiB for KV holds {pages} pages of {self.needs.page / MIB:.2f} MiB; at least {least} are needed. "
                "Raise kv_memory_gib or lower page_size."
            )
        if self.slots.total and self.needs.most is not None:
            return min(pages, 1 + self.slots.most_running * self.needs.most)
        return pages

    def describe(self, num_pages: int) -> str:
        """The memory of the pools, by kind, as text."""
        needs, slots, size = self.needs, self.slots, self.config.page_size
        parts = []
        if slots.total:
            kept = f", up to {slots.kept} of them for kept prefixes" if slots.kept else ""
            parts.append(f"{slots.total} slots of state, {needs.slot / MIB:.2f} MiB each ({self.state_bytes / MIB:.1f} MiB){kept}")
        if needs.page:
            of = f" in {len(self.groups)} groups of layers" if self.groups else ""
            pages = f"{num_pages} pages of {size} tokens{of}, {needs.page / MIB:.3f} MiB each ({num_pages * needs.page / MIB:.1f} MiB)"
            parts.append(pages)
        return f"{(self.state_bytes + num_pages * needs.page) / MIB:.1f} MiB: {'; '.join(parts)}"

    def _configured_pages(self, num_pages: int) -> int:
        of_all, of_group = page_bytes_ratio(self.layers, self.groups)
        return max(num_pages * of_all // of_group, 1 + len(self.groups)) if self.groups else num_pages

    def _state_slots(self, chunks: bool, agree: Callable[[int], int]) -> StateSlots:
        config, needs = self.config, self.needs
        kept = config.state_snapshots if config.prefix_cache else 0
        if kept is None and not chunks:
            kept = 0
        memory, full = self._bytes(), 0
        if config.num_pages is not None:
            memory = max(memory - self._configured_pages(config.num_pages) * needs.page, memory * BESIDE_PAGES)
            fit = int(memory // needs.slot)
        else:
            fit = self._slots_beside_pages(memory)
            full = 0 if needs.most is None else int((memory - needs.slot - needs.page) // (needs.slot + needs.most * needs.page))
        wanted = config.max_requests + (config.max_requests if kept is None else kept)
        if kept is None and config.num_pages is None:
            wanted = max(wanted, full)  # with that many slots and all their pages, nothing else needs the memory
        total = agree(min(fit, wanted + 1))
        if total < 2:
            beside = f", beside {1 + needs.least} pages of {needs.page / MIB:.2f} MiB" if needs.page and config.num_pages is None else ""
            raise UnsupportedError(
                f"{memory / MIB:.1f} MiB for KV and recurrent state holds {total} slots of {needs.slot / MIB:.2f} MiB{beside}; "
                "at least 2 are needed. Raise kv_memory_gib."
            )
        kept = total - 1 if kept is None else min(kept, total - 1)
        return StateSlots(total, kept, min(kept, (total - 1) // RESERVE))

    def _slots_beside_pages(self, memory: float) -> int:
        """How many slots, including slot 0, if pages share the memory."""
        needs = self.needs
        fit = int(memory // (needs.slot + needs.pages_per_slot))
        if needs.most is not None:  # leave room for a request of full length, if half of the memory holds it
            fit = min(fit, int((memory - min((1 + needs.most) * needs.page, memory / 2)) // needs.slot))
        most = int((memory - (1 + needs.least) * needs.page) // needs.slot)
        return min(max(fit, 2), max(most, 0))

    def _bytes(self, kept_free: int = 0, taken: int = 0) -> float:
        """Bytes for KV and recurrent state, of which `taken` are already allocated."""
        if self.config.kv_memory_gib is not None:
            return self.config.kv_memory_gib * 2**30
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the driver does not report cached memory, left by loading and checking the model, as free
            return max(torch.cuda.mem_get_info(self.device)[0] + taken - kept_free, 0) * GPU_KV_SHARE
        return CPU_KV_GIB * 2**30
