"""Errors planted in what is served, each of a kind that peers have shipped; the self-check must see every one, in every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.base import AttentionBackend

Change = Callable[[AttentionSpec], AttentionSpec]
SPEC_ERRORS: dict[str, Change] = {
    "window": lambda spec: replace(spec, sliding_window=spec.sliding_window and spec.sliding_window + 1),
    "softcap": lambda spec: replace(spec, softcap=None),
    "scale": lambda spec: replace(spec, scale=1.25 * spec.scale),
}


def applicable(specs: Sequence[AttentionSpec]) -> list[str]:
    """The errors that a model with these layers can have; `row` is for `hook_a_row`."""
    found = ["row"]
    if specs:
        found += ["scale", "position", "page"]
    found += ["window"] * any(spec.sliding_window is not None for spec in specs)
    found += ["softcap"] * any(spec.softcap is not None for spec in specs)
    return found + ["sinks"] * any(spec.has_sinks for spec in specs)


@contextmanager
def planted(error: str) -> Iterator[None]:
    """Inside, steps go wrong; those of `SPEC_ERRORS` are planted where the specs are kept."""
    with ExitStack() as undo:
        if error == "sinks":
            undo.enter_context(_without_sinks())
        elif error == "position":
            undo.enter_context(_changed_batches(_one_further))
        elif error == "page":
            undo.enter_context(_changed_batches(_another_requests_page))
        else:
            raise ValueError(error)
        yield


@contextmanager
def _without_sinks() -> Iterator[None]:
    forward = AttentionBackend.forward

    def dropped(backend: AttentionBackend, *args: Any, sinks: Tensor | None = None, **more: Any) -> None:
        nothing = None if sinks is None else torch.full_like(sinks, torch.finfo(sinks.dtype).min / 2)
        forward(backend, *args, sinks=nothing, **more)

    with mock.patch.object(AttentionBackend, "forward", dropped):
        yield


@contextmanager
def _changed_batches(change: Callable[[Batch], None]) -> Iterator[None]:
    build = Batch.build.__func__  # type: ignore[attr-defined]

    def built(cls: type[Batch], *args: Any, **more: Any) -> Batch:
        batch: Batch = build(cls, *args, **more)
        change(batch)
        return batch

    with mock.patch.object(Batch, "build", classmethod(built)):
        yield


def _one_further(batch: Batch) -> None:
    """The positions of requests that have cached tokens."""
    further = (batch.seq_lens > batch.query_lens).long().repeat_interleave(batch.query_lens.long())
    batch.positions[: len(further)] += further


def _another_requests_page(batch: Batch) -> None:
    """The second request reads its last cached tokens from the first one's first page."""
    if batch.num_real_requests > 1 and (cached := batch.seq_lens_host[1] - batch.query_lens_host[1]):
        column = (cached - 1) // batch.page_size
        batch.page_table[1, column] = batch.page_table[0, 0]
        if batch.page_table_host is not None:
            batch.page_table_host[1, column] = batch.page_table_host[0, 0]


def hook_a_row(model: nn.Module) -> bool:
    """A forward hook that changes the middle row of a call, in the second feed-forward block; False if there is none."""
    names = ("mlp", "ffn", "feed_forward", "block_sparse_moe", "moe", "mixer")
    blocks = [module for name, module in model.named_modules() if name.rpartition(".")[2] in names]
    if len(blocks) < 2:
        return False

    def changed(_: nn.Module, __: Any, output: Any) -> Any:
        rows: Tensor = (output[0] if isinstance(output, tuple) else output).clone()
        middle = rows[..., rows.shape[-2] // 2, :]
        middle.copy_(middle.flip(-1))  # no norm after it takes that back
        return (rows, *output[1:]) if isinstance(output, tuple) else rows

    blocks[1].register_forward_hook(changed)
    return True
