"""Checks that the graph with adapters adds them where peft would: with random factors in every layer, against hooks on the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest, RequestColumns
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.by_group import without_groups
from paged_attn.calling.plain_modes import as_served
from paged_attn.engine.lora.adapter_files import Factors
from paged_attn.engine.lora.lora_pool import LoraPool
from paged_attn.engine.lora.lora_runner import LoraRunner, LoraSlots
from paged_attn.recurrent.run import runner_of
from paged_attn.tolerances import logits_apart

TOKENS = (2, 3, 1, 4, 3, 2)
SLOT = 0
CHECKED = (torch.float32, torch.float64)  # in 16 bits a deep model's own rounding hides what an adapter adds


def check_adapters(runner: LoraRunner, pool: KVPool, backend: AttentionBackend) -> None:
    """Compare one prompt, in the first pages, which nobody may use yet. Leaves the slots empty.

    Raises:
        UnsupportedError: the logits differ from those of the model whose linear layers add the same factors.
    """
    adapters = runner.adapters
    if runner.dtype not in CHECKED or not adapters.sites:
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
