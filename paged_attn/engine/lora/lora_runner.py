"""The runner for steps with adapters: a model's runner with a second graph beside its own, and the adapter of each row in a step.

`check_adapters` checks that the graph adds them where peft would: with random factors in every layer, against hooks on the model itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.batch.packed_ints import IntBuffer, PackedInts, words
from paged_attn.attn_ops.batch.requests import RequestColumns
from paged_attn.attn_ops.batch.step_buffers import MIN_ROWS
from paged_attn.attn_ops.context import ForwardContext, current_context
from paged_attn.attn_ops.errors import ContextError, UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.by_group import without_groups
from paged_attn.calling.plain_modes import as_served
from paged_attn.compiled.graph_inputs import logits_of
from paged_attn.compiled.lora_graph import LoraGraph
from paged_attn.engine.lora.adapter_files import Factors
from paged_attn.engine.lora.lora_pool import LoraPool
from paged_attn.engine.runners.merged_weights import with_spare_rows
from paged_attn.engine.runners.traced_runner import TracedRunner
from paged_attn.recurrent.run import runner_of
from paged_attn.tolerances import logits_apart

TOKENS = (2, 3, 1, 4, 3, 2)
SLOT = 0
CHECKED = (torch.float32, torch.float64)  # in 16 bits a deep model's own rounding hides what an adapter adds


class LoraRunner(TracedRunner):
    """The same model in the same memory, run by its graph with adapters; batches say each row's (`LoraSlots.given`).

    Args:
        base: keeps the model as it is while it is served; checks of the model are those of its graph, as both call the same kernels.
        slots, rank: those that the graph was made for.
    """

    def __init__(self, base: TracedRunner, graph: LoraGraph, slots: int, rank: int) -> None:
        vars(self).update(vars(base))
        self.base = base  # kept alive: some of what it set up may be undone when it is freed
        bound = self.inputs.all
        self._weights = {merge.inputs[0]: with_spare_rows(bound[merge.inputs[0]], merge) for merge in graph.widened}
        calls = _calls(base, {part.module for site in graph.sites for part in site.parts})
        self.adapters = LoraPool(self.model, graph.sites, slots, rank, self.device, self._weights, calls)
        self.graph, self._run = graph, graph.split.gm.forward

    @property
    def runs_as(self) -> str:
        return f"{super().runs_as}, with adapters"

    @property
    def owned(self) -> dict[str, Tensor]:
        """The tensors of the model, and the adapters' factors."""
        return {**super().owned, **{f"adapters {index}": tensor for index, tensor in enumerate(self.adapters.tensors)}}

    def forward(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        """As `TracedRunner.forward`. Raises ContextError: no forward context, or its batch says nothing of adapters."""
        context = current_context()
        slots = None if context is None else (context.batch.lora_slots, context.batch.lora_logits_slots)
        if slots is None or slots[0] is None:
            raise ContextError("LoraRunner.forward needs a forward context whose batch went through LoraSlots.given")
        inputs = self.inputs.fill(input_ids, positions, logits_rows)
        for index, weight in self._weights.items():
            inputs[index] = weight
        more = [*slots, *self.adapters.inputs] if self.adapters.sites else []
        logits = logits_of(self._run(*inputs, *more))
        return logits if self.takes_logits_rows else logits[logits_rows]

    def close(self) -> None:
        """Nothing: the model is the other runner's."""


class LoraSlots:
    """Slots of rows and of rows of logits, where captured graphs read them: at addresses that follow from a step's shape alone. `max_rows`,
    `max_logits`: of a step that was captured; larger ones get memory of their own."""

    def __init__(self, max_rows: int, max_logits: int, device: torch.device) -> None:
        self._most = max(max_rows, MIN_ROWS), max(max_logits, MIN_ROWS)
        self._device, self._buffer = device, IntBuffer(words((), self._most), device)

    def given(self, batch: Batch, columns: RequestColumns | None) -> Batch:
        """The batch with the slots of its rows; -1 for padding, and for all if there are no columns. The step before loses its own."""
        sizes = batch.num_rows, batch.logits_rows.shape[0]
        fits = all(size <= most for size, most in zip(sizes, self._most, strict=True))
        packed = PackedInts((), sizes, self._device, self._buffer if fits else None)
        for field in packed.host:
            field.fill(-1)
        if columns is not None and columns.lora_slots is not None:
            for field, counts in zip(packed.host, (columns.num_new, columns.num_logits), strict=True):
                slots = np.repeat(columns.lora_slots, counts)
                field[: len(slots)] = slots
        rows, logits = packed.to_device()
        return replace(batch, lora_slots=rows, lora_logits_slots=logits)


def check_adapters(runner: LoraRunner, pool: KVPool, backend: AttentionBackend) -> None:
    """Compare one prompt, in the first pages, which nobody may use yet. Leaves the slots empty. Raises UnsupportedError: the logits differ
    from those of the model whose linear layers add the same factors."""
    adapters = runner.adapters
    if runner.dtype not in CHECKED or not adapters.modules:
        return
    pool, backend = without_groups(pool, backend, len(TOKENS) + 1)
    tokens = TOKENS[: (pool.num_pages - 1) * pool.page_size]
    request = BatchRequest(tokens, range(1, -(-len(tokens) // pool.page_size) + 1), num_logits=len(tokens), state_slot=1)
    columns = RequestColumns.of([request])
    columns.lora_slots = np.array([SLOT])
    slots = LoraSlots(len(tokens), len(tokens), runner.device)
    batch = slots.given(Batch.build(columns, pool.page_size, runner.device), columns)
    states = runner_of(runner.recurrent, 1, runner.device)
    with torch.no_grad(), _random_factors(adapters):
        with ForwardContext(batch, pool, backend, states):
            given = runner.forward(batch.input_ids, batch.positions, batch.logits_rows)[: len(tokens)].clone()
        with as_served(runner.model), _hooked(runner.model, adapters):
            expected = runner.logits_alone(torch.tensor(tokens, device=runner.device))
    error, limit = logits_apart(expected, given, runner.dtype)
    if not error <= limit:
        raise UnsupportedError(
            f"max_loras: with random adapters in all linear layers the graph of {type(runner.model).__name__} gives logits that are off by "
            f"{error:.2g} of their size (allowed {limit:.2g}) from the model's with the same adapters, so that none are served; leave "
            "max_loras and loras out, or report it"
        )


def _calls(runner: TracedRunner, paths: Iterable[str]) -> dict[str, int]:
    """How often one call of the model calls each of these modules, rounded up. Where its code multiplies with a layer's weight instead, the
    graph has a product like the layer's, but an adapter in the model adds nothing."""
    counts = dict.fromkeys(("", *paths), 0)
    with ExitStack() as undo, as_served(runner.model), torch.no_grad():
        for path in counts:

            def count(*_: Any, path: str = path) -> None:
                counts[path] += 1

            undo.callback(runner.model.get_submodule(path).register_forward_hook(count).remove)
        runner.logits_alone(torch.tensor(TOKENS, device=runner.device))
    whole = max(counts.pop(""), 1)
    return {path: -(-count // whole) for path, count in counts.items()}


@contextmanager
def _random_factors(adapters: LoraPool) -> Iterator[None]:
    numbers = torch.Generator().manual_seed(0)
    try:
        for path in adapters.modules:
            a, b, _ = adapters.factors(path, SLOT)
            first, second = (torch.randn(each.shape, generator=numbers) * each.shape[1] ** -0.5 for each in (a, b))
            adapters.write(SLOT, path, Factors(first, second, float(torch.rand((), generator=numbers))))
        yield
    finally:
        adapters.clear(SLOT)


@contextmanager
def _hooked(model: Any, adapters: LoraPool) -> Iterator[None]:
    """Inside, each linear layer adds its factors itself."""
    with ExitStack() as undo:
        for path in adapters.modules:
            a, b, scale = adapters.factors(path, SLOT)

            def add(_: Any, given: tuple[Tensor, ...], output: Tensor, a: Tensor = a, b: Tensor = b, scale: Tensor = scale) -> Tensor:
                return output + F.linear(F.linear(given[0], a), b) * scale

            undo.callback(model.get_submodule(path).register_forward_hook(add).remove)
        yield
