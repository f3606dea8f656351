"""`PagedCache`: Hugging Face's own `generate` on paged KV."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from paged_attn.hf.cache_in_place import InPlace
from paged_attn.hf.cache_layers import PagedLayer, forget_state
from paged_attn.hf.cache_probe import common_window, keeping, page_layout, paged_layers, probe
from paged_attn.hf.patch import Patched
from paged_attn.hf.shared_pages import SharedPages
from paged_attn.hf.shared_table import SharedTable


class PagedCache(Cache):
    """`model.generate(..., past_key_values=PagedCache(model))`: K and V are stored in pages that rows share until one of them writes.

    Works with any attention implementation: a layer writes its new K and V into pages and gets everything it may see gathered, exactly as
    a DynamicCache holds it. Beams share their common past, `copy.deepcopy` of a cache shares all of its pages (a prompt computed once
    can be continued in many ways), and crop() frees pages. If every layer has a window, pages behind the largest one are freed
    (not when attending in place: kernels do not support holes). Recurrent states of hybrid models are stored as transformers does.

    Inside `with paged_attn.patch(model) as patched:`, `PagedCache(patched)` goes further: steps attend to the pages in place, without
    a gather, if that is the same computation (`cache_in_place.py` says when); `steps_in_place` counts them.

    Args:
        model: the model whose K and V it keeps, or an active patch of it; one token is run to find their shapes.
        page_size: tokens per page; 16 by default.
        num_pages: fixes the pool's size, including page 0 (reserved); by default it grows as needed, by half, into a new allocation.
        shared_with: use the pool of this cache of the same model, instead of a new one.

    Raises:
        UnsupportedError: the model's layers keep something that pages cannot hold; the message names it.
        ValueError: impossible sizes, or sizes together with `shared_with`.
        TypeError: sizes that are not ints, or `shared_with` is not a PagedCache.
        CacheFull (while generating): a pool of fixed size is too small; nothing was written in that step.
    """

    table: SharedTable
    in_place: InPlace | None
    steps_in_place: int = 0

    def __init__(
        self,
        model: nn.Module | Patched,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
        shared_with: PagedCache | None = None,
    ) -> None:
        if shared_with is not None and not isinstance(shared_with, PagedCache):
            raise TypeError(f"shared_with is a {type(shared_with).__name__}; allowed: a PagedCache of the same model")
        for name, size in (("page_size", page_size), ("num_pages", num_pages)):
            if size is not None and not isinstance(size, int):
                raise TypeError(f"{name} is {size!r}; allowed: an int")
        self.in_place = InPlace(model) if isinstance(model, Patched) else None
        model = model.model if isinstance(model, Patched) else model
        seen = probe(model)
        layout, dtype, device = page_layout(model, seen)
        ids = list(range(len(layout)))
        if self.in_place is not None:
            layout, ids = self.in_place.layers(layout, keeping(seen))
        if shared_with is None:
            pages = SharedPages.of_layers(layout, 16 if page_size is None else page_size, dtype, device, num_pages)
        elif page_size is not None or num_pages is not None:
            raise ValueError("page_size and num_pages are those of the cache in shared_with; give either them or shared_with")
        else:
            pages = shared_with.table.pages
            if (pages.pool.layers, pages.pool.dtype, pages.pool.device) != (layout, dtype, device):
                raise ValueError(
                    "shared_with is a cache for a model with other K and V, or only one of the two was made from a patch; share pages "
                    "between caches that are made alike, for one model"
                )
        self.table = SharedTable(pages, common_window(seen) if self.in_place is None else None)
        super().__init__(layers=paged_layers(seen, self.table, ids))

    @property
    def page_size(self) -> int:
        return self.table.pages.page_size

    @property
    def num_pages_held(self) -> int:
        """Pages of this cache; a page shared by several rows counts once."""
        return len(self.table.held)

    @property
    def num_pages_used(self) -> int:
        """Pages of the pool that any cache holds."""
        return self.table.pages.num_used

    def advance(self, new: int) -> None:
        """Counts `new` tokens that every layer has written into pages prepared by `table.prepare`."""
        self.steps_in_place += 1
        for layer in self._paged():
            layer.length += int(layer.kv is not None) * new

    def reset(self) -> None:
        """Forgets everything and frees the pages."""
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                layer.reset()
            else:
                forget_state(layer)
        self.table.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i continues from row beam_idx[i]; beams with the same origin share its pages."""
        for layer in self._unpaged():
            layer.reorder_cache(beam_idx)
        self._move(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows: integers, or a mask with an entry per row."""
        for layer in self._unpaged():
            layer.batch_select_indices(indices)
        if self.table.rows:
            self._move(torch.arange(self.table.rows)[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times in succession, on the same pages."""
        for layer in self._unpaged():
            layer.batch_repeat_interleave(repeats)
        self._move(torch.arange(self.table.rows).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `-tokens_to_remove` tokens (a number of at most 0) and frees pages that become empty.

        Raises:
            ValueError: a positive number.
            RuntimeError: tokens that the windows would need again were already freed.
        """
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 passes a tensor
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass a negative number, the tokens to remove; a length is no longer taken")
        paged = self._paged()
        lengths = [max(layer.length + tokens_to_remove, 0) for layer in paged]
        window, kept = self.table.window, self.table.kept_from
        if tokens_to_remove and window is not None and max(max(lengths) - window + 1, 0) < kept:
            raise RuntimeError(
                f"crop({tokens_to_remove}): every layer has a window, and the tokens before {kept} that it would show again were let go; "
                "call activate_past_recording() before, as assisted generation does"
            )
        for layer in self._unpaged():
            layer.crop(tokens_to_remove)
        for layer, length in zip(paged, lengths, strict=True):
            layer.length = length
        self.table.truncate(max(lengths))

    def _move(self, rows: Tensor) -> None:
        if self.table.rows:
            self.table.select(np.asarray(rows.cpu(), np.int64))

    def _paged(self) -> list[PagedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    def _unpaged(self) -> list[Any]:
        return [layer for layer in self.layers if type(layer) is not PagedLayer]
