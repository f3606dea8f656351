"""The cache that `generate` holds while an engine's steps keep K and V, in pages of rows of unequal length."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.hf.cache_name import CACHE_NAME
from paged_attn.hf.generate.refuse import generate_frame
from paged_attn.hf.shared_pages import Pages, SharedPages
from paged_attn.interrupts import uninterrupted

Ids = NDArray[np.int64]
Lengths = NDArray[np.int64]


IN_PAGES = (
    "the keys and values of this cache are in the pages of model.compile(backend='paged_attn'): copy.deepcopy(cache) branches it; to read "
    "or save them, give generate a cache of your own, with which it runs as written: a DynamicCache(config=model.config)"
)


class _NoLayers(list[Any]):
    """The layers of a cache that has none: transformers may count them."""

    def __getitem__(self, index: Any) -> NoReturn:
        raise UnsupportedError(IN_PAGES)


class RaggedCache(Cache):
    """A transformers Cache without layers: its tokens are in an engine's pages, each row's without its padding.

    Args:
        table: pages of its rows.
        padding: [rows] int64, tokens of padding on each row's left.
        ids: [rows, length] int64, its tokens so far, including padding.
        lock: held while steps run on the pages.

    Attributes:
        length: tokens of every row including padding, which is what transformers counts.
    """

    is_compileable, is_initialized, is_croppable = False, True, True

    def __init__(self, table: RaggedTable, padding: Lengths, ids: Ids, lock: Any) -> None:
        super().__init__(layers=_NoLayers())
        self.table, self.padding, self.length = table, padding, ids.shape[1]
        self._ids, self._lock = ids, lock

    def __bool__(self) -> bool:
        return True  # some models test whether they were given a cache, and it has no layers

    @property
    def ids(self) -> Ids:
        """[rows, length] int64: its tokens, including padding."""
        return self._ids[:, : self.length]

    def append(self, ids: list[list[int]]) -> None:
        """Adds tokens to every row whose K and V are already in the pages."""
        end = self.length + len(ids[0])
        if end > self._ids.shape[1]:
            self._ids = np.pad(self.ids, ((0, 0), (0, max(end, 2 * self.length) - self.length)))
        self._ids[:, self.length : end] = ids
        self.length = end

    def __del__(self) -> None:
        if (table := self.__dict__.get("table")) is not None:
            table.shared.drop_later(table.pages)

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedCache:
        with self._lock:
            other = RaggedCache(self.table.copied(), self.padding.copy(), self.ids.copy(), self._lock)
        memo[id(self)] = other
        return other

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(IN_PAGES)  # a shallow copy would release its pages a second time

    def __iter__(self) -> NoReturn:
        raise UnsupportedError(IN_PAGES)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.length)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return len(self.padding)

    @property
    def is_linear(self) -> list[bool]:
        return [False]  # transformers counts `length` tokens unless all layers are linear, and `all([])` is True

    def activate_past_recording(self) -> None:
        """Does nothing: every token is kept until it is cropped."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i continues from row beam_idx[i]; beams with the same origin share its pages."""
        self._select(np.asarray(beam_idx.cpu(), np.int64))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows: integers, or a mask with an entry per row."""
        self._select(np.asarray(torch.arange(self.batch_size)[indices.cpu()], np.int64))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times in succession, on the same pages."""
        self._select(np.arange(self.batch_size).repeat(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `-tokens_to_remove` tokens (a number of at most 0). Raises ValueError: a positive number."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass a negative number, the tokens to remove; a length is no longer taken")
        self.length = max(self.length + int(tokens_to_remove), 0)  # assisted generation of 5.17 passes a tensor
        with self._lock:
            self.table.truncate(np.maximum(self.length - self.padding, 0))

    def reset(self) -> None:
        raise UnsupportedError("a cache that compiled generate made ends with its generate; begin the next one without a cache")

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            "this cache holds the pages of model.compile(backend='paged_attn'), but the model was called uncompiled; use it only with the "
            "compiled model"
        )

    def _select(self, rows: Lengths) -> None:
        with self._lock:
            self.table.select(rows)
            self.padding, self._ids = self.padding[rows], self._ids[rows]


def may_leave_pages(model: PreTrainedModel, cache: RaggedCache, given: dict[str, Any]) -> bool:
    """Whether this is a call of `generate`, which continues with any cache that it gets back, for the rows of the cache."""
    ids = given.get("input_ids")
    of_its_rows = isinstance(ids, Tensor) and ids.ndim == 2 and len(ids) == cache.batch_size
    return of_its_rows and generate_frame(model) is not None and not torch.is_grad_enabled() and not model.training


def recomputed(model: Any, cache: RaggedCache) -> DynamicCache:
    """A DynamicCache with the same tokens, computed by the uncompiled model."""
    again = DynamicCache(config=model.config)
    ids = torch.from_numpy(cache.ids).to(model.device)
    positions = torch.arange(cache.length, device=ids.device) - torch.from_numpy(cache.padding).to(ids.device)[:, None]
    given: dict[str, Any] = {"position_ids": positions.clamp(min=0), "logits_to_keep": 1}
    taken = inspect.signature(model.forward).parameters
    model._call_impl(
        input_ids=ids, attention_mask=(positions >= 0).long(), use_cache=True, **{CACHE_NAME: again},
        **{name: value for name, value in given.items() if name in taken},
    )  # fmt: skip
    return again


class RaggedTable:
    """Rows x pages of one cache. A table that is deleted releases its pages.

    Attributes:
        lengths: [rows] int64, number of tokens in each row.
        pages: [rows, width] int64, each row's pages in order, then zeros.
    """

    def __init__(self, shared: SharedPages, rows: int = 0) -> None:
        self.shared = shared
        self.lengths: Lengths = np.zeros(rows, np.int64)
        self.pages: Pages = np.zeros((rows, 0), np.int64)

    @property
    def num_pages(self) -> Lengths:
        """[rows] int64: the number of pages of each row."""
        return -(-self.lengths // self.shared.page_size)

    @uninterrupted
    def extend(self, new: Lengths) -> None:
        """Makes room for `new` [rows] more tokens in each row, in pages that no other row holds. Raises CacheFull: too few pages are free;
        nothing was changed."""
        size, before = self.shared.page_size, self.num_pages
        after = -(-(self.lengths + new) // size)
        rows = ((self.lengths % size > 0) & (new > 0)).nonzero()[0]  # these also write into their last page
        columns = self.lengths[rows] // size
        self.pages[rows, columns], added = self.shared.make_writable(self.pages[rows, columns], int((after - before).sum()))
        width = int(after.max(initial=0))
        if width > self.pages.shape[1]:
            self.pages = np.pad(self.pages, ((0, 0), (0, max(width, 2 * self.pages.shape[1]) - self.pages.shape[1])))
        counts = after - before
        owner = np.arange(len(new)).repeat(counts)
        self.pages[owner, np.arange(len(added)) - (counts.cumsum() - counts - before)[owner]] = added
        self.lengths = self.lengths + new

    @uninterrupted
    def select(self, rows: NDArray[np.int64]) -> None:
        """Row i continues from row `rows[i]`; nothing is copied."""
        pages = self.pages[rows]
        self.shared.hold(pages)
        self.shared.drop(self.pages)
        self.pages, self.lengths = pages, self.lengths[rows]

    @uninterrupted
    def truncate(self, lengths: Lengths) -> None:
        """Forgets each row's tokens from `lengths` [rows] on."""
        self.lengths = np.minimum(self.lengths, lengths)
        gone = np.arange(self.pages.shape[1]) >= self.num_pages[:, None]
        self.shared.drop(self.pages[gone])
        self.pages[gone] = 0

    @uninterrupted
    def copied(self) -> RaggedTable:
        """Another table with the same rows on the same pages."""
        other = RaggedTable(self.shared)
        self.shared.hold(self.pages)
        other.lengths, other.pages = self.lengths.copy(), self.pages.copy()
        return other
