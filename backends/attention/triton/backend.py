"""The Triton backend: one attention kernel for decode and extend, its work divided by stream-K; no package beyond Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from paged_attn.attn_ops.batch.batch import Batch, ForwardMode
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.backends.attention.base import AttentionBackend, AttentionCall
from paged_attn.backends.attention.capabilities import Capabilities, Feature, GraphSupport, Span
from paged_attn.backends.needs import TRITON, UP_TO_FLOAT32, importing

if TYPE_CHECKING:
    from paged_attn.backends.attention.triton.latent.launch import LatentLaunch
    from paged_attn.backends.attention.triton.launch import LayerLaunch
    from paged_attn.backends.attention.triton.plan import Plan


SHORTEST_SMALL = 256  # fewest tokens of each request


class TritonBackend(AttentionBackend):
    name = "triton"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=UP_TO_FLOAT32,
        kv_dtypes=UP_TO_FLOAT32,
        features=frozenset(
            {Feature.WINDOW, Feature.CHUNK, Feature.DUAL_CHUNK, Feature.SOFTCAP, Feature.SINKS, Feature.ALIBI, Feature.POSITION_BIAS,
             Feature.BIDIRECTIONAL, Feature.LSE, Feature.MLA, Feature.UNEQUAL_DIMS, Feature.DETERMINISTIC}
        ),
        head_dims=Span(1, 256),
        latent_dims=(Span(1, 512), Span(0, 128)),
        graphs={"extend": GraphSupport.ALWAYS, "decode": GraphSupport.ALWAYS},
        requirements=(TRITON,),
        note="our own kernels",
    )  # fmt: skip
    compiles_ahead = True

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(deterministic=deterministic)
        with importing(self.name, "Triton", TRITON):
            import triton  # noqa: F401
        from paged_attn.backends.attention.triton.latent.launch import LatentLaunch
        from paged_attn.backends.attention.triton.launch import LayerLaunch
        from paged_attn.backends.attention.triton.plan import Plan, deal_plans, small_steps
        from paged_attn.backends.attention.triton.tiling import in_hopper_kernel
        from paged_attn.backends.kv_write.launch import store_rows
        from paged_attn.backends.machine import machine_of

        self._small_steps, self._in_hopper_kernel, self._machine_of = small_steps, in_hopper_kernel, machine_of
        self._make_plan, self._deal_plans = Plan.of, deal_plans
        self._layer_launch, self._latent_launch, self._store_rows = LayerLaunch.of, LatentLaunch.of, store_rows
        self._launches: WeakKeyDictionary[KVPool, dict[tuple[Any, ...], LayerLaunch | LatentLaunch]] = WeakKeyDictionary()

    def plan(self, batch: Batch, pool: KVPool) -> Plan:
        return self._make_plan(batch, pool, self.deterministic)

    def plan_in_graph(self, plan: Plan) -> None:
        self.plan_groups_in_graph([plan])

    def plan_groups_in_graph(self, plans: Sequence[Plan], model_follows: bool = False) -> None:
        self._deal_plans(plans, model_follows)

    def graph_support(self) -> GraphSupport:
        """NEVER in deterministic mode: parts are cut at fixed keys, so the grid depends on the host's lengths."""
        return GraphSupport.NEVER if self.deterministic else super().graph_support()

    def graph_lengths(self, requests: int, max_context: int, pool: KVPool) -> tuple[int, ...]:
        """A graph for each kind of step that can occur, launched as `tiling` says for it: few keys, and all others."""
        small = self._small(pool, requests)
        return (*(keys // requests for keys in small if keys < requests * max_context), max_context)

    def graph_variant(self, batch: Batch, pool: KVPool) -> int:
        keys = sum(batch.seq_lens_host)
        return sum(small < keys for small in self._small(pool, batch.num_requests))

    def _small(self, pool: KVPool, requests: int) -> list[int]:
        """Keys of the kinds of small steps that are worth the memory of a graph: not if only the shortest contexts would count."""
        return [keys for keys in self._small_steps(pool, max(requests, 1)) if keys // max(requests, 1) >= SHORTEST_SMALL]

    def store_and_attend(self, plan: Plan, call: AttentionCall, store: bool) -> None:
        """Like the base class, except that a decode step stores its K and V in the attention kernel unless they are latents.

        Such a kernel may read the keys and values of earlier tokens before the kernel launched last has ended (PDL). So what writes them
        otherwise, such as a copy of a page, must not be launched last: an engine's steps compute the queries in between.
        """
        if store and plan.batch.mode is ForwardMode.DECODE and not self.deterministic and not isinstance(call.spec, LatentSpec):
            self._attend(plan, call, fused_write=True)
        else:
            super().store_and_attend(plan, call, store)

    def attends_expanded(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the kernel for Hopper supports them."""
        return dtype.itemsize == 2 and self._machine_of(device).hopper and self._in_hopper_kernel(spec)

    def write_kv(self, plan: Plan, call: AttentionCall) -> None:
        batch, pool = plan.batch, plan.pool
        self._store_rows(call.key, call.value, pool.key(call.layer_id), pool.value(call.layer_id), batch.slots, batch.num_tokens)

    def forward_extend(self, plan: Plan, call: AttentionCall) -> None:
        self._attend(plan, call, fused_write=False)

    forward_decode = forward_extend

    def _attend(self, plan: Plan, call: AttentionCall, fused_write: bool) -> None:
        if call.output.stride(-1) != 1:
            output = call.output
            call.output = torch.empty(output.shape, dtype=output.dtype, device=output.device)
            self._attend(plan, call, fused_write)
            output[: plan.batch.num_tokens] = call.output[: plan.batch.num_tokens]
            return
        launches = self._launches.setdefault(plan.pool, {})
        for index in plan.by_layer[call.layer_id][call.spec.chunk_part]:
            shares = plan.shares[index]
            launch = launches.get(key := (call.layer_id, shares.kind, fused_write))
            if launch is None:
                layer = (plan.pool, call.layer_id, shares.kind)
                latent = isinstance(plan.pool.layers[call.layer_id], LatentSpec)
                launch = launches[key] = self._latent_launch(*layer) if latent else self._layer_launch(*layer, fused_write)
            launch(plan, shares, call)
