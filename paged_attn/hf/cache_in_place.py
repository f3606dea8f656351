"""Steps of `generate` that attend to the pages in place, without a gather, under `paged_attn.patch`."""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any, Protocol

import numpy as np
import torch

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.selection.select import select_for_pool
from paged_attn.calling.left_as_it_was import replaced_forward
from paged_attn.calling.plain_modes import autocasts
from paged_attn.hf.cache_name import CACHE_NAME, given_cache
from paged_attn.hf.compiled_generate.call_rows import CallRows, call_rows, more_than_tokens
from paged_attn.hf.patch import Patched
from paged_attn.hf.shared_table import SharedTable
from paged_attn.passes.fx.model_facts import model_dtype

_dispatching: weakref.WeakSet[Any] = weakref.WeakSet()  # patches whose model's forward already is a `_Dispatch`


class CacheInPages(Protocol):
    """The part of `PagedCache` that a step in place needs."""

    table: SharedTable

    def get_seq_length(self) -> int: ...

    def advance(self, count: int) -> None: ...


class InPlace:
    """Runs calls of a patched model with a PagedCache of this object as one ragged row, if that is the same computation.

    That is: all inputs are keywords; one new token per row, or one row; a past; no padding, consecutive positions, no gradients, no
    autocast, and only logits as output. Any other call runs unchanged, on gathered K and V.
    """

    def __init__(self, patched: Patched) -> None:
        if not patched._modules:
            raise UnsupportedError("this patch is not active; make the PagedCache inside `with paged_attn.patch(model) as patched:`")
        self.patched = patched
        self.backend: Any = None
        if patched not in _dispatching:
            _dispatching.add(patched)
            patched._undo.callback(_dispatching.discard, patched)
            patched._undo.enter_context(replaced_forward(patched.model, _Dispatch(patched.model.forward)))

    def __deepcopy__(self, memo: dict[int, Any]) -> InPlace:
        return self

    def layers(self, layout: tuple[AttentionSpec, ...], indices: list[int]) -> tuple[tuple[AttentionSpec, ...], list[int]]:
        """(the specs for the pool, the index among them of each cache layer that keeps K and V).

        Args:
            layout: specs of those cache layers.
            indices: their indices in the cache.
        """
        specs: tuple[AttentionSpec, ...] = self.patched.layers
        modules: list[Any] = self.patched._modules
        owners = [i for i, spec in enumerate(specs) if spec.kv_layer == i]
        found = [(modules[i].layer_idx, specs[i].num_kv_heads, specs[i].qk_head_dim, specs[i].v_head_dim) for i in owners]
        kept = [(i, s.num_kv_heads, s.qk_head_dim, s.v_head_dim) for i, s in zip(indices, layout, strict=True)]
        if found != kept:
            raise UnsupportedError(
                f"the cache keeps (layer, heads, K dim, V dim) {kept}, but its attention was patched as {found}; use PagedCache(model), "
                "which gathers"
            )
        return specs, owners

    def run(self, cache: CacheInPages, forward: Any, inputs: dict[str, Any]) -> Any:
        """The model's output for `forward(**inputs)`, with the cache advanced; None if the call must run unchanged."""
        model: Any = self.patched.model
        length = cache.get_seq_length()
        if not length or not self.patched._modules or torch.is_grad_enabled() or not model.config.return_dict:
            return None
        if more_than_tokens(model, inputs) or autocasts() or 1 not in inputs["input_ids"].shape:
            return None
        rows, new = inputs["input_ids"].shape
        called = call_rows(inputs, length, np.zeros(rows, np.int64))
        if isinstance(called, str):
            return None
        with cache.table.pages.lock:  # if another thread made the pool grow during the step, the new pool would lack what it writes
            return self._step(cache, forward, called, rows, new, inputs.get("logits_to_keep") is not None)

    def _step(self, cache: CacheInPages, forward: Any, called: CallRows, rows: int, new: int, some: bool) -> Any:
        """`some`: only the logits of the last tokens."""
        model, length = self.patched.model, cache.get_seq_length()
        cache.table.prepare(rows, length, length + new)
        pool = cache.table.pages.pool
        if self.backend is None:
            self.backend = select_for_pool("auto", pool, model_dtype(model)).backend
        row_pages: list[Any] = cache.table.row_pages()
        requests = [BatchRequest(own, pages, length, called.wanted) for own, pages in zip(called.tokens, row_pages, strict=True)]
        batch = Batch.build(requests, pool.page_size, pool.device)
        tokens = {"input_ids": batch.input_ids[None], "position_ids": batch.positions[None]}
        if some:
            tokens["logits_to_keep"] = batch.logits_rows[: batch.num_logits]
        with ForwardContext(batch, pool, self.backend):
            output = forward(**tokens, use_cache=False, return_dict=True)
        logits = output.logits if some else output.logits[:, : rows * new]
        output["logits"] = logits.reshape(rows, -1, logits.shape[-1])
        output[CACHE_NAME] = cache
        cache.advance(new)
        return output


class _Dispatch:
    """A patched model's forward, which first tries to run in place. A copy of the model gets its own forward back."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward
        functools.update_wrapper(self, forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._forward, memo)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        if "past_key_values" in inputs:  # otherwise transformers' warning about the old name would blame our code
            inputs[CACHE_NAME] = inputs.pop("past_key_values")
        cache: Any = given_cache(inputs)
        in_place = getattr(cache, "in_place", None)
        if not args and isinstance(in_place, InPlace):
            output = in_place.run(cache, self._forward, inputs)
            if output is not None:
                return output
        return self._forward(*args, **inputs)
