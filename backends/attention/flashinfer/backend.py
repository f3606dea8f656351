"""FlashInfer behind the contract.

On entry of the forward context, before the model starts, one of FlashInfer's wrappers is planned per step and distinct kind of layer.
Nothing waits for the device; what remains is FlashInfer's own host work, once per kind. A mixed batch whose decodes are adjacent runs
as two parts, each with the kernel that suits it. Prompts with nothing cached read the step's own K and V. A decode step whose requests
share a long prefix attends to it once (see `choose.cascade_pays`), if the batch has a `page_table_host` to find it in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch

from paged_attn.attn_ops.batch.batch import Batch, ForwardMode
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.backends.attention.base import AttentionCall, StoringBackend
from paged_attn.backends.attention.capabilities import DECODE_GRAPHS, Capabilities, Feature, OneOf
from paged_attn.backends.attention.flashinfer.choose import PrefillChoice, cascade_pays, prefill_kernel
from paged_attn.backends.attention.flashinfer.kinds import LN_2, RANK, ROTATED, Kind, PoolKinds, kind_for, kinds_of
from paged_attn.backends.attention.flashinfer.launches import Cascade, LatentLaunch, Launch
from paged_attn.backends.attention.flashinfer.planner import GraphBuffers, Planner
from paged_attn.backends.attention.flashinfer.tables import Part, Tables, parts_of, prefix_tables, shared_pages, tables_of
from paged_attn.backends.attention.flashinfer.wrappers import Slot, WrapperPool, announce, import_flashinfer
from paged_attn.backends.devices import architecture_of
from paged_attn.backends.needs import FLASHINFER, HALF


@dataclass
class Plan:
    """A step's parts, tables and planned launches. It owns its wrappers, so it must live as long as the step.

    `launches`: by part, kind and whether K and V are the step's own; `stored`: layers whose K and V this step wrote.
    """

    batch: Batch
    pool: KVPool
    layers: PoolKinds
    parts: tuple[Part, ...]
    planner: Planner
    tables: dict[tuple[int, int], Tables] = field(default_factory=dict)
    shared: dict[int, int] = field(default_factory=dict)
    launches: dict[tuple[int, int, bool], Launch | LatentLaunch | Cascade] = field(default_factory=dict)
    stored: set[int] = field(default_factory=set)

    def tables_for(self, part: int, skip: int = 0) -> Tables:
        """The tables of a part without the first `skip` pages of each request."""
        if (part, skip) not in self.tables:
            self.tables[part, skip] = tables_of(self.batch, self.parts[part], skip)
        return self.tables[part, skip]

    def shared_for(self, part: int) -> int:
        """The number of pages that all requests of a decoding part share."""
        if part not in self.shared:
            self.shared[part] = shared_pages(self.batch, self.parts[part])
        return self.shared[part]


class FlashInferBackend(StoringBackend):
    """FlashInfer's paged, ragged and cascade kernels.

    Args:
        prefill: the kernel for extending requests; "auto" chooses per step (see `choose.prefill_kernel`).
        cascade: whether shared prefixes may be attended to once.
    """

    name = "flashinfer"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=HALF,
        kv_dtypes=HALF,
        features=frozenset({Feature.WINDOW, Feature.SOFTCAP, Feature.SINKS, Feature.BIDIRECTIONAL, Feature.LSE, Feature.MLA}),
        architectures=frozenset({80, 86, 89, 90, 100, 103, 120}),
        head_dims=OneOf({64, 128, 256}),
        latent_dims=(OneOf({RANK}), OneOf({ROTATED})),
        graphs=DECODE_GRAPHS,
        requirements=(FLASHINFER,),
        conflicts=frozenset(
            {frozenset({Feature.SOFTCAP, Feature.SINKS}), frozenset({Feature.MLA, Feature.WINDOW}),
             frozenset({Feature.MLA, Feature.SOFTCAP}), frozenset({Feature.MLA, Feature.SINKS})}
        ),
        note="tested on SM90; compiles its kernels on first use; no bidirectional window off SM90; latents in pools of up to 2^32 numbers",
    )  # fmt: skip

    def __init__(self, *, deterministic: bool = False, prefill: PrefillChoice = "auto", cascade: bool = True) -> None:
        super().__init__(deterministic=deterministic)
        if prefill not in get_args(PrefillChoice):
            raise ValueError(f"prefill is {prefill!r}; allowed are {', '.join(map(repr, get_args(PrefillChoice)))}")
        self._module = import_flashinfer(self.name)
        self._prefill, self._cascade = prefill, cascade
        self.wrappers = WrapperPool()
        self._planners: dict[tuple[torch.device, torch.dtype, int], Planner] = {}

    def plan(self, batch: Batch, pool: KVPool) -> Plan:
        """Plans every kind of layer of the pool, for every part of the batch; latents of extending steps are planned on demand.

        Raises:
            UnsupportedError: a layer or pool that FlashInfer cannot run.
        """
        plan = Plan(batch, pool, kinds_of(pool), parts_of(batch), self.planner(pool))
        for part in range(len(plan.parts)):
            for kind, owns_kv in plan.layers.used:
                # In an extending step, only some requests may attend to rows of latents; these have a plan of their own.
                if batch.mode is ForwardMode.DECODE or not plan.layers.kinds[kind].rank:
                    self._launch(plan, part, kind, owns_kv and _reads_own(plan, part, kind))
        return plan

    def write_kv(self, plan: Plan, call: AttentionCall) -> None:
        super().write_kv(plan, call)
        plan.stored.add(call.layer_id)

    def forward_extend(self, plan: Plan, call: AttentionCall) -> None:
        """Also runs decode steps: the plan's parts select the kernel."""
        kind, written = kind_for(plan.layers, call, plan.pool), call.layer_id in plan.stored
        for index, part in enumerate(plan.parts):
            rows = slice(part.row, part.end)
            ragged = written and _reads_own(plan, index, kind)
            launch = self._launch(plan, index, kind, ragged)
            key = call.key[rows] if ragged else plan.pool.key(call.layer_id)
            value = call.value[rows] if ragged else plan.pool.value(call.layer_id)
            lse = None if call.lse_out is None else call.lse_out[rows]
            launch(call.query[rows], key, value, call.output[rows], lse, call.sinks)
            if lse is not None:
                lse.mul_(LN_2)

    def for_graph(self, max_requests: int, max_pages: int) -> GraphDecode:
        """A backend for decode steps in one captured graph, with fixed buffers and wrappers; `max_pages` counts the pages of all requests.

        backend = FlashInferBackend().for_graph(max_requests=64, max_pages=4096)
        plan = backend.plan(batch, pool)                # outside the capture
        with torch.cuda.graph(graph):
            ...                                         # backend.forward(plan, ...) for each layer
        backend.refresh(plan, next_batch)               # fills the same buffers
        graph.replay()
        """
        return GraphDecode(self, max_requests, max_pages)

    def planner(self, pool: KVPool) -> Planner:
        """The planner for pools of that device, dtype and page size."""
        key = (pool.device, pool.dtype, pool.page_size)
        if key not in self._planners:
            self._planners[key] = Planner(self._module, self.wrappers, *key)
        return self._planners[key]

    def _launch(self, plan: Plan, part: int, kind: int, ragged: bool) -> Launch | LatentLaunch | Cascade:
        launch = plan.launches.get((part, kind, ragged))
        if launch is None:
            launch = plan.launches[part, kind, ragged] = self._planned(plan, part, plan.layers.kinds[kind], ragged)
        return launch

    def _planned(self, plan: Plan, index: int, kind: Kind, ragged: bool) -> Launch | LatentLaunch | Cascade:
        part = plan.parts[index]
        if kind.rank:
            return plan.planner.latent(kind, plan.tables_for(index), plan, causal=not part.decode and kind.causal)
        if not part.decode:
            query_lens = plan.batch.query_lens_host[part.first : part.last]
            kernel = prefill_kernel(kind, query_lens, architecture_of(plan.pool.device), plan.planner.num_sms, self._prefill)
            if ragged:
                return plan.planner.ragged(kind, plan.tables_for(index), plan, kernel)
            return plan.planner.prefill(kind, plan.tables_for(index), plan, kernel)
        shared = plan.shared_for(index) if self._cascade else 0
        if not cascade_pays(kind, part.last - part.first, shared * plan.batch.page_size):
            return plan.planner.decode(kind, plan.tables_for(index), plan)
        announce("merge", "any layer")
        prefix = plan.planner.prefill(kind, prefix_tables(plan.batch, part, shared), plan, "fa2", causal=False)
        return Cascade(prefix, plan.planner.decode(kind, plan.tables_for(index, shared), plan), self._module.merge_state_in_place)


def _reads_own(plan: Plan, part: int, kind: int) -> bool:
    """Whether the step's own K and V are all that the part's requests have. Sinks and latents are used only with pages."""
    found = plan.layers.kinds[kind]
    return plan.parts[part].fresh and not found.has_sinks and not found.rank


@dataclass
class GraphPlan:
    batch: Batch
    pool: KVPool
    layers: PoolKinds
    launches: list[Launch | LatentLaunch] = field(default_factory=list)


class GraphDecode(StoringBackend):
    """Decode steps of up to `max_requests` requests with at most `max_pages` pages, counting one for each missing request.

    Made by `FlashInferBackend.for_graph`; serves one pool and one stream. Its plan waits if the device has not started the previous step.
    A batch may have fewer requests: the rest read the reserved page 0, and their rows are padding. Shared prefixes are not used.
    """

    def __init__(self, parent: FlashInferBackend, max_requests: int, max_pages: int) -> None:
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
        """Fills the buffers for this step.

        Raises:
            UnsupportedError: a batch that does not fit into the graph, or another pool than in the first plan.
        """
        self._check(batch, pool)
        if self.buffers is None:
            self.buffers = GraphBuffers(self._max_requests, self._max_pages, pool.device)
        plan, planner = GraphPlan(batch, pool, kinds_of(pool)), self._parent.planner(pool)
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
        """Plans again, into the same wrappers and buffers, which the graph reads. Waits as `plan` does."""
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
    """(makes a wrapper for decode steps of a kind, plans it)."""
    if kind.rank:
        return planner.make_latent, partial(planner.plan_latent, causal=False)
    if kind.has_sinks:
        return partial(planner.make_prefill, kernel="fa2"), partial(planner.plan_prefill, causal=kind.causal)
    return planner.make_decode, planner.plan_decode
