"""`model.compile(backend="paged_attn")`: calls of a Hugging Face model, of which those that `generate` makes run on pages."""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from paged_attn.attn_ops.batch.batch import RequestColumns
from paged_attn.attn_ops.context import current_context
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.engine import Engine
from paged_attn.engine.model.model_state import ModelState, hooked_module
from paged_attn.engine.tracing.ropes_by_length import RopesByLength
from paged_attn.hf.cache_name import CACHE_NAME, given_cache, output_with_cache, without_cache
from paged_attn.hf.compiled_generate.call_rows import CallRows, Part, call_rows, steps, why_not
from paged_attn.hf.compiled_generate.ragged_cache import Lengths, RaggedCache, RaggedTable, may_leave_pages, recomputed
from paged_attn.hf.generate.kept_engine import change_of, follows_model
from paged_attn.hf.generate.refuse import generate_frame
from paged_attn.hf.shared_pages import CacheFull, SharedPages
from paged_attn.interrupts import held_back

logger = logging.getLogger("paged_attn")
_MOVED = "_paged_attn_moved"  # attribute that marks a DynamicCache replaced by a RaggedCache
MOST_REFUSED = 3  # engines tried for a model that keeps changing and is refused each time


class LastingRefusalError(UnsupportedError):
    """A refusal that no change of the model can lift."""


class Refusal:
    """Why a compiled model has no engine (`why`), as long as that holds; "" if it was not refused."""

    def __init__(self) -> None:
        self.why = ""
        self._was: ModelState | None = None
        self._count = 0

    def note(self, model: nn.Module, error: UnsupportedError) -> None:
        self._count += 1
        lasts = isinstance(error, LastingRefusalError) or self._count == MOST_REFUSED
        self.why, self._was = str(error), None if lasts else ModelState(model)

    def holds(self) -> bool:
        """Whether the model was refused, and still has the modules, parameters and hooks that it had then."""
        if self._was is not None and (found := self._was.difference()) is not None and found.replaced:
            self.why, self._was = "", None
        return bool(self.why)


class PagedCalls:
    """Calls of a compiled model. Calls of `generate` with a cache of its own run as steps of an engine; calls without a cache run what
    torch.compile made; with any other cache the model runs uncompiled, since Dynamo would compile it again for every length.

    The first step creates the engine, whose pages, graphs and threads serve only these calls.

    Args:
        compiled: made by torch.compile.

    Attributes:
        engine: None before the first step, or if there can be none.
        refusal: why there is none.
        num_steps: steps of engines so far.
    """

    def __init__(self, model: nn.Module, compiled: Callable[..., Any], config: EngineConfig) -> None:
        self._model = weakref.ref(model)
        self.compiled, self.config = compiled, config
        self.engine: Engine | None = None
        self.refusal = Refusal()
        self.num_steps = 0
        self._lock = threading.RLock()
        self._pages: SharedPages | None = None
        self._first: tuple[weakref.ref[DynamicCache], dict[str, Any]] | None = None
        self._said: set[str] = set()
        self._length_borders: tuple[int, ...] | None = None

    def __call__(self, *args: Any, **given: Any) -> Any:
        if torch.compiler.is_compiling() or current_context() is not None:
            return self.compiled(*args, **given)
        named = _named(self.model, args, given) if args else given
        cache = given_cache(named)
        if cache is None and self._cache_was_dropped(named) and (output := self._start(None, named)) is not None:
            return output
        if not isinstance(cache, Cache):
            return self.compiled(*args, **given)
        first, self._first = self._first, None
        if isinstance(cache, RaggedCache):
            return self._go_on(cache, named)
        if getattr(cache, _MOVED, False):
            raise UnsupportedError("this DynamicCache was moved to pages; continue with the cache of the last output")
        if type(cache) is DynamicCache:
            if first is not None and first[0]() is cache and self._is_unchanged(cache, first[1]):
                before = self._start(cache, first[1])
                if before is not None:
                    return self._go_on(before[CACHE_NAME], named)
            elif not _num_tokens(cache) and self._is_of_generate(cache):
                output = self._start(cache, named)
                if output is not None:
                    return output
        return self.model._call_impl(*args, **given)

    @property
    def model(self) -> Any:
        model = self._model()
        assert model is not None, "its own call is running"
        return model

    def remember_first(self, given: dict[str, Any]) -> None:
        """Remembers a call of `generate` with an empty cache that runs without pages: the next call with that cache starts over."""
        cache = given_cache(given)
        if type(cache) is DynamicCache and self._is_of_generate(cache):
            self._first = (weakref.ref(cache), {**without_cache(given), "logits_to_keep": 1})

    def _is_unchanged(self, cache: DynamicCache, given: dict[str, Any]) -> bool:
        """Whether the `generate` that made the cache continues where its first call ended, with the cache neither cropped nor replaced. A
        user's own decoding loop may have put other rows into it."""
        ids, frame = given.get("input_ids"), generate_frame(self.model)
        in_order = frame is not None and frame.f_locals.get("custom_generate") is None
        return in_order and self._is_of_generate(cache) and ids is not None and _num_tokens(cache) == ids.shape[1]

    def _is_of_generate(self, cache: Any) -> bool:
        """Whether the `generate` that called us has made it."""
        return not getattr(cache, "_is_user_defined", False) and generate_frame(self.model) is not None

    def _cache_was_dropped(self, given: dict[str, Any]) -> bool:
        """Whether the model dropped the cache of its `generate`, as models do whose rotary embedding changes with the length (longrope)."""
        if not given.get("use_cache") or generate_frame(self.model) is None:
            return False
        if self._length_borders is None:
            self._length_borders = RopesByLength(self.model).borders
        return bool(self._length_borders)

    def _rows(self, given: dict[str, Any], length: int, padding: Lengths | None) -> CallRows | str:
        """The call's rows, or why it cannot run on pages."""
        return why_not(self.model, given) or call_rows(given, length, padding)

    def _start(self, cache: DynamicCache | None, given: dict[str, Any]) -> Any:
        """The output for the first tokens of rows, with K and V in pages; None if the call runs without pages."""
        if self.refusal.holds():
            return None
        called = _not_in_steps(self.model, cache) or self._rows(given, 0, None)
        if isinstance(called, str):
            self._say(f"a call of generate runs without pages: {called}")
            return None
        with held_back, self._lock:
            if not self._ready():
                return None
            assert self._pages is not None
            rows = [tuple(tokens[shift:]) for tokens, shift in zip(called.tokens, called.padding.tolist(), strict=True)]
            indices = {row: index for index, row in enumerate(dict.fromkeys(rows))}  # beams and returned sequences start with equal rows
            table = RaggedTable(self._pages, len(indices))
            logits = self._run(table, [list(row) for row in indices], called.wanted)
            if len(indices) < len(rows):
                order = np.array([indices[row] for row in rows], np.int64)
                table.select(order)
                logits = logits[torch.from_numpy(order).to(logits.device)]
            moved = RaggedCache(table, called.padding, np.array(called.tokens, np.int64), self._lock)
        if cache is not None:
            setattr(cache, _MOVED, True)
        return output_with_cache(logits, moved)

    def _go_on(self, cache: RaggedCache, given: dict[str, Any]) -> Any:
        """The output for more tokens of each row."""
        called = self._rows(given, cache.length, cache.padding)
        if isinstance(called, str):
            if may_leave_pages(self.model, cache, given):
                self._say(f"a call of generate goes on without pages: {called}")
                return self.model._call_impl(**{**without_cache(given), CACHE_NAME: recomputed(self.model, cache)})
            raise UnsupportedError(
                f"a call with a cache of model.compile(backend='paged_attn') cannot run on pages: {called}. Give generate a cache of its "
                "own, with which it runs as written: a DynamicCache(config=model.config), or a paged_attn.PagedCache(model)"
            )
        with held_back, self._lock:
            if self.engine is None or cache.table.shared is not self._pages:
                raise UnsupportedError("the model changed since this cache was made, and its pages are gone; start generate again")
            logits = self._run(cache.table, called.tokens, called.wanted)
            cache.append(called.tokens)
        return output_with_cache(logits, cache)

    def _ready(self) -> bool:
        """Whether there is an engine for the model in its present state."""
        if self.engine is not None:
            around = generate_frame(self.model)
            if around is not None and generate_frame(self.model, around) is not None and (changed := change_of(self.engine)) is not None:
                # assistant_early_exit, which drops layers
                self._say(f"a generate within another one runs without pages: {changed.changes}")
                return False
            if not follows_model(self.engine):
                self.engine.release()
                self.engine = self._pages = None
        if self.engine is None:
            try:
                with held_back.let_through():
                    engine = Engine(self.model, None, self.config.with_(layer_groups=False))  # rows have tables of their own
                _refuse_unsupported(engine)
            except UnsupportedError as refusal:
                self.refusal.note(self.model, refusal)
                self._say(f"generate runs without pages: {refusal}")
                return False
            self.engine, self._pages = engine, SharedPages(engine.pool)
        return True

    def _run(self, table: RaggedTable, tokens: list[list[int]], wanted: int) -> Tensor:
        """Logits [rows, wanted, vocabulary] of each row's last tokens."""
        engine, before = self.engine, table.lengths.copy()
        assert engine is not None
        counts = [len(row) for row in tokens]
        self._make_room(engine, table, np.array(counts, np.int64))
        if parted := engine.limits.parted_at(int(table.lengths.min()), int(table.lengths.max())):
            self._say(parted)
        found: list[list[Tensor]] = [[] for _ in tokens]
        try:
            for parts in steps(counts, wanted, engine.config.step_tokens, engine.config.max_requests):
                columns = _columns(parts, tokens, table, before)
                with held_back.let_through():
                    logits = engine.run_rows(columns)
                self.num_steps += 1
                if len(parts) == len(tokens) and all(part.num_logits == wanted for part in parts):
                    return logits.view(len(parts), wanted, -1)
                for part, own in zip(parts, logits.split([part.num_logits for part in parts]), strict=True):
                    found[part.row].append(own)
        except BaseException:
            table.truncate(before)
            raise
        return torch.stack([torch.cat(own) for own in found])

    def _make_room(self, engine: Engine, table: RaggedTable, new: Any) -> None:
        most, limit = int((table.lengths + new).max()), engine.limits.max_positions
        if limit is not None and most > limit:
            raise UnsupportedError(f"a row would have {most} tokens, and {type(self.model).__name__} has {limit} positions; generate fewer")
        try:
            table.extend(new)
        except CacheFull as full:
            raise UnsupportedError(
                f"{full.needed} more KV pages of {engine.config.page_size} tokens are needed, and {full.free} of {engine.pool.num_pages} "
                "are free: generate for fewer rows or tokens at a time, or set PAGED_ATTN_KV_MEMORY_GIB or PAGED_ATTN_NUM_PAGES before "
                "the first call of generate"
            ) from full

    def _say(self, words: str) -> None:
        if words not in self._said:
            self._said.add(words)
            logger.warning("%s: %s", type(self.model).__name__, words)


def _named(model: Any, args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
    """All inputs by name. Raises TypeError: as the call itself would."""
    signature = inspect.signature(model.forward)
    signature.bind_partial(*args, **given)
    return {**dict(zip(signature.parameters, args, strict=False)), **given}


def _not_in_steps(model: nn.Module, cache: DynamicCache | None) -> str:
    """What a caller has asked of the model or the cache that no step does; "" if nothing."""
    if hooked := hooked_module(model):  # a graph holds what a hook computes, not what it records
        return f"{hooked} has a forward hook"
    return "its cache is offloaded, and pages lie on the device" if getattr(cache, "offloading", False) else ""


def _num_tokens(cache: Cache) -> int | None:
    """How many tokens it holds; None for a cache that holds only recurrent states, which does not count them."""
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return None


def _refuse_unsupported(engine: Engine) -> None:
    """Releases the engine and raises LastingRefusalError if its steps need more than the rows of `generate`."""
    name = type(engine.runner.model).__name__
    if engine.state_pool is not None:
        why = f"{name} has recurrent state, which paged_attn.generate and LLM keep"
    elif engine.runner.ranks is not None:
        why = f"{name} is sharded over {engine.runner.ranks.size} ranks, which LLM serves"
    else:
        return
    engine.release()
    raise LastingRefusalError(why)


def _columns(parts: list[Part], tokens: list[list[int]], table: RaggedTable, before: Any) -> RequestColumns:
    """A step of these parts of `tokens`; `before` [rows]: tokens of each row already in its pages."""
    rows = np.array([part.row for part in parts], np.int64)
    starts, ends = (np.array([getattr(part, name) for part in parts], np.int64) for name in ("start", "end"))
    num_pages = table.num_pages[rows]
    return RequestColumns(
        tokens=np.concatenate([np.asarray(tokens[part.row][part.start : part.end], np.int64) for part in parts]),
        page_table=table.pages[rows, : int(num_pages.max())].astype(np.int32),
        num_pages=num_pages,
        num_cached=before[rows] + starts,
        num_new=ends - starts,
        num_logits=np.array([part.num_logits for part in parts], np.int64),
        state_slots=np.zeros(len(parts), np.int64),
        lengths=before[rows] + np.array([len(tokens[part.row]) for part in parts], np.int64),
    )
