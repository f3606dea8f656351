"""Random steps of dual chunk attention for backends, with everything that must not be read poisoned with NaN, and the paper's formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.ops.dual_chunk import DUAL_CHUNK_ATTENTION
from paged_attn.attn_ops.specs.dual_chunk import DualChunkSpec
from paged_attn.backends.attention.base import AttentionBackend
from tests.backends.problems import LAYER, NAN, TOLERANCE, Case, make, moved, restride

CHUNK = 6
# (cached, new) of each request: within a chunk, at its borders, over several
STEPS = {
    "prompts": ((0, 5), (0, 6), (0, 1), (0, 7), (0, 31)),
    "decode": ((4, 1), (5, 1), (6, 1), (11, 1), (12, 1), (41, 1)),
    "mixed": ((12, 1), (0, 9), (16, 5), (3, 1), (31, 14)),
    "chunks": ((6, 6), (5, 11), (18, 13)),
    "short": ((0, 4), (2, 3)),
}


def spec_of(chunk: int = CHUNK, **changes: Any) -> DualChunkSpec:
    sizes = {"num_q_heads": 4, "num_kv_heads": 2, "qk_head_dim": 8, "v_head_dim": 8, "scale": 0.41}
    return DualChunkSpec(**{**sizes, "chunk": chunk, "kv_layer": LAYER, **changes})


@dataclass
class DualChunkCase:
    """A step whose intra-chunk queries are those of `step`; `expected` [tokens, q_heads, v_dim] in float64."""

    step: Case
    others: tuple[Tensor, Tensor]
    expected: Tensor

    def run(self, backend: AttentionBackend, plan: Any = None, batch: Any = None) -> Tensor:
        """[rows, q_heads, v_dim], NaN before the call."""
        step = self.step
        output = torch.full_like(step.query[..., : step.spec.v_head_dim], NAN, memory_format=torch.contiguous_format)
        with ForwardContext(batch or step.batch, step.pool, backend, plan=plan):
            DUAL_CHUNK_ATTENTION(step.query, *self.others, step.key, step.value, output, LAYER)
        return output

    def assert_right(self, backend: AttentionBackend, tolerance: float | None = None) -> Tensor:
        """The output, which has the formula's numbers; the step's keys and values, and nothing else, are written."""
        step, before = self.step, self.step.pool.storage.clone()
        output, count = self.run(backend), step.batch.num_tokens
        assert not output[count:].any(), "padding is zeroed"
        tolerance = tolerance or TOLERANCE[output.dtype]
        torch.testing.assert_close(output[:count].double().cpu(), self.expected, atol=tolerance, rtol=tolerance)
        at = (step.batch.slots[:count] // step.batch.page_size, step.batch.slots[:count] % step.batch.page_size)
        for kept, rows in ((step.pool.key(LAYER), step.key), (step.pool.value(LAYER), step.value)):
            assert torch.equal(kept[at], rows[:count])
            kept[at] = NAN
        assert torch.equal(step.pool.storage.nan_to_num(7.0), before.nan_to_num(7.0)), "nothing else is written"
        return output

    def to(self, device: torch.device | str) -> DualChunkCase:
        """The same case on a device, with a pool of its own; what is expected stays where it is."""
        first, second = (moved(each, device) for each in self.others)
        assert first is not None and second is not None
        return replace(self, step=self.step.to(device), others=(first, second))


def case_of(
    lengths: Sequence[tuple[int, int]], spec: DualChunkSpec | None = None, *, strides: str = "contiguous", **settings: Any
) -> DualChunkCase:
    spec = spec or spec_of()
    step = make(lengths, spec, strides=strides, **settings)
    draw = torch.Generator().manual_seed(7)

    def queries() -> Tensor:
        rows = torch.randn(step.query.shape, generator=draw).to(step.query.dtype)
        rows[step.batch.num_tokens :] = NAN
        return restride(rows, strides)

    others = queries(), queries()
    expected = [
        dense(spec, [each[step.rows(r)] for each in (step.query, *others)], step.dense_keys[r], step.dense_values[r])
        for r in range(len(lengths))
    ]
    return DualChunkCase(step, others, torch.cat(expected))


def dense(spec: DualChunkSpec, queries: Sequence[Tensor], keys: Tensor, values: Tensor) -> Tensor:
    """One softmax over scores of three queries, for the last tokens of one request: [new, q_heads, v_dim] in float64."""
    assert spec.chunk is not None
    keys, values = (each.double().repeat_interleave(spec.group_size, 1) for each in (keys, values))
    intra, successive, inter = (torch.einsum("qhd,khd->hqk", each.double(), keys) * spec.scale for each in queries)
    j = torch.arange(len(keys))
    i = j[len(keys) - len(queries[0]) :, None]
    distance = i // spec.chunk - j // spec.chunk
    scores = torch.where(distance == 0, intra, torch.where(distance == 1, successive, inter)).masked_fill(j > i, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
