"""FlashInfer decode for captured graphs: fixed buffers, fixed wrappers, one size.

How a graph is captured and replayed with it:

    backend = FlashInferBackend().for_graph(max_requests=64, max_pages=4096)
    plan = backend.plan(batch, pool)                # outside the capture
    with torch.cuda.graph(graph):
        ...                                         # backend.forward(plan, ...) for each layer
    backend.refresh(plan, next_batch)               # fills the same buffers
    graph.replay()

A batch may have fewer requests than the graph: the rest read the reserved page 0, and their rows are padding. Shared prefixes are not
looked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

from paged_attn.attn_ops.batch.batch import Batch, ForwardMode
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.backends.attention.base import AttentionCall, StoringBackend
from paged_attn.backends.attention.capabilities import Capabilities
from paged_attn.backends.attention.flashinfer.kinds import LN_2, Kind, PoolKinds, kind_for
from paged_attn.backends.attention.flashinfer.launches import LatentLaunch, Launch
from paged_attn.backends.attention.flashinfer.planner import GraphBuffers, Planner
from paged_attn.backends.attention.flashinfer.tables import Part, tables_of
from paged_attn.backends.attention.flashinfer.wrappers import Slot


@dataclass
class GraphPlan:
    batch: Batch
    pool: KVPool
    layers: PoolKinds
    launches: list[Launch | LatentLaunch] = field(default_factory=list)


class Planning(Protocol):
    """The backend whose graph it is, as far as a graph needs it."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def kinds(self, pool: KVPool) -> PoolKinds: ...

    def planner(self, pool: KVPool) -> Planner: ...


class GraphDecode(StoringBackend):
    """Decode steps of up to `max_requests` requests whose pages are `max_pages` at most, one per missing request included.

    Made by `FlashInferBackend.for_graph`. It serves one pool and one stream. Its plan waits if the device has not begun
    the step before.
    """

    def __init__(self, parent: Planning, max_requests: int, max_pages: int) -> None:
        super().__init__()
        if max_requests < 1 or max_pages < max_requests:
            raise ValueError(
                f"a graph needs max_requests >= 1 and a page for each request; got max_requests={max_requests}, max_pages={max_pages}"
            )
        self.name, self.capabilities = parent.name, parent.capabilities  # type: ignore[misc]
        self._parent, self._max_requests, self._max_pages = parent, max_requests, max_pages
        self._pool: KVPool | None = None
        self.buffers: GraphBuffers | None = None
        self._slots: dict[Kind, Slot] = {}

    def plan(self, batch: Batch, pool: KVPool) -> GraphPlan:
        """Fill the buffers for this step.

        Raises:
            UnsupportedError: a batch that the graph cannot hold, or another pool than that of the first plan.
        """
        self._check(batch, pool)
        if self.buffers is None:
            self.buffers = GraphBuffers(self._max_requests, self._max_pages, pool.device)
        plan, planner = GraphPlan(batch, pool, self._parent.kinds(pool)), self._parent.planner(pool)
        tables = tables_of(batch, Part(0, batch.num_requests, 0, batch.num_requests, True, False), requests=self._max_requests)
        if tables.kv_indices.numel() > self._max_pages:
            raise UnsupportedError(
                f"the graph was made for max_pages={self._max_pages}; this batch needs {tables.kv_indices.numel()}: make a larger one"
            )
        for kind in plan.layers.kinds:
            make_wrapper, plan_wrapper = _ways(planner, kind)
            if kind not in self._slots:
                self._slots[kind] = Slot(make_wrapper(kind, buffers=self.buffers), pool.device)
            slot = self._slots[kind]
            slot.wait()
            plan_wrapper(slot, kind, tables)
            plan.launches.append((LatentLaunch if kind.rank else Launch)(slot.wrapper, kind))
        return plan

    def refresh(self, plan: GraphPlan, batch: Batch) -> None:
        """Plan again: into the same wrappers and buffers, which the graph reads. It waits where `plan` does."""
        self.plan(batch, plan.pool)

    def forward_decode(self, plan: GraphPlan, call: AttentionCall) -> None:
        launch, rows = plan.launches[kind_for(plan.layers, call, plan.pool)], slice(0, self._max_requests)
        lse = None if call.lse_out is None else call.lse_out[rows]
        launch(call.query[rows], plan.pool.key(call.layer_id), plan.pool.value(call.layer_id), call.output[rows], lse, call.sinks)
        if lse is not None:
            lse.mul_(LN_2)

    def forward_extend(self, plan: GraphPlan, call: AttentionCall) -> None:
        raise AssertionError("a plan for a graph is made of decode steps only")

    def _check(self, batch: Batch, pool: KVPool) -> None:
        if self._pool is None:
            self._pool = pool
        if pool is not self._pool:
            raise UnsupportedError("a graph reads one pool's addresses, and got another pool: make one graph per pool")
        if batch.mode is not ForwardMode.DECODE:
            raise UnsupportedError(f"a graph of FlashInfer's holds decode steps; got mode {batch.mode.value}: run this step without it")
        if batch.num_requests > self._max_requests or batch.num_rows < self._max_requests:
            raise UnsupportedError(
                f"the graph was made for max_requests={self._max_requests}; got {batch.num_requests} requests in {batch.num_rows} rows: "
                f"allowed are at most that many requests in at least that many rows"
            )


def _ways(planner: Planner, kind: Kind) -> tuple[Callable[..., Any], Callable[..., None]]:
    """What makes a wrapper for decode steps of a kind, and what plans it."""
    if kind.rank:
        return planner.make_latent, partial(planner.plan_latent, causal=False)
    if kind.has_sinks:
        return partial(planner.make_prefill, kernel="fa2"), partial(planner.plan_prefill, causal=kind.causal)
    return planner.make_decode, planner.plan_decode
