"""A captured graph's decode step in fixed buffers, as the engine replays it: for backends' contract here and on the GPU.

What records a graph is passed in: on the CPU it is a stand-in that calls the captured function again, with the capture's plan and batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.batch.step_buffers import StepBuffers, StepShape
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.reference import ReferenceBackend
from tests.backends.problems import LAYER, NAN, Case, bits, close, copy_of, make, moved, run

ORACLE = ReferenceBackend()
Lengths = Sequence[int]  # tokens in cache before the step, of each real request
Record = Callable[[Callable[[], None]], Callable[[], None]]


class Spoiled(tuple[int, ...]):
    """Host lengths that have a length and nothing else."""

    def __iter__(self) -> Any:
        raise AssertionError("a captured forward looked at host lengths")

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("a captured forward looked at host lengths")


@dataclass
class Captured:
    plan: Any
    replay: Callable[[], None]


class GraphSteps:
    """Graphs of one layer of `requests` decode requests, one for each of the backend's `graph_lengths`; `width` pages per request.

    Pages that no request has, unused slots, page 0, and what dummies bring are NaN; unused columns of the page table name such pages.
    """

    def __init__(
        self, backend: AttentionBackend, spec: AttentionSpec, record: Record, *, requests: int = 4, width: int, page_size: int,
        dtype: torch.dtype, device: str = "cpu", lse: bool = False,
    ) -> None:  # fmt: skip
        self.requests, self.dtype, self.device = requests, dtype, torch.device(device)
        self.longest = width * page_size
        small = make([(self.longest - 1, 1)], spec, page_size=page_size, dtype=dtype)  # biases have a place for each key
        self.pool = KVPool(small.pool.layers, requests * width + 5, page_size, dtype, device)
        self.buffers = StepBuffers(max(2, requests), max(2, requests), requests, width, device)
        self.buffers.page_tables[0].fill_(self.pool.num_pages - 1)

        def rows(heads: int, dim: int) -> Tensor:
            return torch.full((requests, heads, dim), NAN, dtype=dtype, device=device)

        self.query, self.key = rows(spec.num_q_heads, spec.qk_head_dim), rows(spec.num_kv_heads, spec.qk_head_dim)
        self.value, self.output = rows(spec.num_kv_heads, spec.v_head_dim), rows(spec.num_q_heads, spec.v_head_dim)
        self.lse = self.output.new_full(self.output.shape[:2], NAN, dtype=torch.float32) if lse else None
        self.sinks, self.bias = moved(small.sinks, self.device), moved(small.bias, self.device)
        self.spec, self.source = spec, backend
        self.backend = backend.for_graph(requests, requests * width)
        self.graphs = [self._capture(length, record) for length in backend.graph_lengths(requests, self.longest, self.pool)]

    def build(self, requests: Sequence[BatchRequest]) -> Batch:
        """A step in the fixed buffers."""
        shape = StepShape(self.requests, self.requests, self.requests)
        return Batch.build(requests, self.pool.page_size, self.device, shape, self.buffers)

    def planned(self, length: int) -> Any:
        """A plan for a graph, captured where every request has that length on the host and one token on the device."""
        batch = dataclasses.replace(self.build([]), seq_lens_host=(length,) * self.requests)
        return self.backend.plan(batch, self.pool)

    def _capture(self, length: int, record: Record) -> Captured:
        plan = self.planned(length)
        object.__setattr__(plan.batch, "seq_lens_host", Spoiled((-1,) * self.requests))
        object.__setattr__(plan.batch, "query_lens_host", Spoiled((-1,) * self.requests))
        object.__setattr__(plan.batch, "page_table_host", None)

        def forward() -> None:
            self.backend.plan_in_graph(plan)
            self.backend.forward(
                plan, LAYER, self.spec, self.query, self.key, self.value, self.output, save_kv_cache=True, sinks=self.sinks,
                bias=self.bias, lse_out=self.lse,
            )  # fmt: skip

        return Captured(plan, record(forward))

    def case(self, cached: Lengths, seed: int = 0, layout: str = "shuffled") -> Case:
        """A step of these requests in a pool of its own, on the CPU, with the graph's sinks and biases."""
        case = make([(c, 1) for c in cached], self.spec, page_size=self.pool.page_size, dtype=self.dtype, layout=layout, seed=seed)
        return dataclasses.replace(case, sinks=moved(self.sinks, "cpu"), bias=moved(self.bias, "cpu"))

    def load(self, case: Case) -> list[BatchRequest]:
        """The case's KV and operands in the fixed places; its requests."""
        count, elements = case.batch.num_requests, case.pool.storage.numel()
        self.pool.storage.fill_(NAN)[:elements].copy_(case.pool.storage)
        for fixed, new in ((self.query, case.query), (self.key, case.key), (self.value, case.value)):
            fixed.fill_(NAN)[:count].copy_(new[:count])
        self.output.fill_(NAN)
        table, tokens, size = case.batch.page_table_host, case.batch.input_ids.tolist(), self.pool.page_size
        assert table is not None
        return [
            BatchRequest(tokens[r : r + 1], table[r, : -(-length // size)].tolist(), length - 1)
            for r, length in enumerate(case.batch.seq_lens_host)
        ]

    def step(self, requests: Sequence[BatchRequest], variant: int | None = None) -> None:
        """What the engine does between two steps."""
        batch = self.build(requests)
        graph = self.graphs[self.source.graph_variant(batch, self.pool) if variant is None else variant]
        self.backend.refresh(graph.plan, batch)
        graph.replay()

    def check(self, cached: Lengths, variant: int | None = None, seed: int = 0, layout: str = "shuffled") -> None:
        """One replay gives the oracle's rows, and writes the new K and V and nothing else but page 0."""
        case = self.case(cached, seed, layout)
        theirs, count = copy_of(case), len(cached)
        output = case.query.new_full((case.batch.num_rows, *self.output.shape[1:]), NAN).float()
        expected, expected_lse = run(theirs, ORACLE, lse=self.lse is not None, output=output)
        self.step(self.load(case), variant)
        close(self.output[:count], expected[:count], self.dtype)
        if self.lse is not None and expected_lse is not None:
            close(self.lse[:count], expected_lse[:count], self.dtype)
        first, last = self.pool.page_elements, case.pool.storage.numel()
        storage = self.pool.storage.cpu()
        assert torch.equal(bits(storage[first:last]), bits(theirs.pool.storage[first:])), "the new K and V, or something else"
        assert storage[last:].isnan().all(), "pages of nobody were written"


def plan_numbers(value: Any) -> Any:
    """What a plan took from its batch in numbers: all that is not a tensor, batch, pool or foreign object; of a tensor its shape."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Batch | KVPool):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, [(f.name, plan_numbers(getattr(value, f.name))) for f in dataclasses.fields(value)]
    if isinstance(value, dict):
        return [(key, plan_numbers(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [plan_numbers(item) for item in value]
    return value if isinstance(value, int | float | str) else type(value).__name__
