"""The contract of an attention backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, ForwardMode
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.latent import LatentCall
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.capabilities import Capabilities, Feature, GraphSupport
from paged_attn.backends.attention.latent.step import attend_to_latents
from paged_attn.backends.kv_write.store import store_kv


@dataclass(slots=True)
class AttentionCall:
    """One layer of one step, with the op's arguments.

    query [T, q_heads, qk_dim], key [T, kv_heads, qk_dim], value [T, kv_heads, v_dim], any strides; output [T, q_heads, v_dim];
    sinks [q_heads] or None; lse_out [T, q_heads] float32 or None; bias [q_heads, N] or None, read as `spec.bias_index` says.
    If another op wrote this step's K and V (save_kv_cache=False), only the pool has them, and `key` is not rotated.
    """

    layer_id: int
    spec: AttentionSpec
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    sinks: Tensor | None
    lse_out: Tensor | None
    bias: Tensor | None = None


class AttentionBackend(ABC):
    """Runs every attention layer of a step. Optional packages are imported in `__init__`, whose ImportError holds the install line.

    A backend writes only a call's `output` (and `lse_out`), all T rows of it: rows from `batch.num_tokens` on are zeros, and no padded
    row or unused page may influence a real one.

    Args:
        deterministic: a row's result must be bitwise the same whatever else is in the batch (batch-invariant kernels); only for backends
            whose capabilities include Feature.DETERMINISTIC.

    Raises:
        UnsupportedError: deterministic=True without that feature.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    compiles_ahead: ClassVar[bool] = False  # whether all launches of `plan`, `plan_in_graph` and `forward` go through `backends.compiling`

    def __init__(self, *, deterministic: bool = False) -> None:
        if deterministic and Feature.DETERMINISTIC not in self.capabilities.features:
            raise UnsupportedError(
                f"{self.name} is not batch-invariant; name another backend, such as 'triton', or leave deterministic off"
            )
        self.deterministic = deterministic

    def while_compiling_ahead(self) -> AttentionBackend:
        """The backend that runs steps on fake tensors: this one, or one without the kernels that do not accept fake tensors."""
        return self if self.compiles_ahead else OnlyStores(kv=isinstance(self, StoringBackend))

    @abstractmethod
    def plan(self, batch: Batch, pool: KVPool) -> Any:
        """Host work, once per step and never per layer. Must not wait for the device."""

    def plan_in_graph(self, plan: Any) -> None:  # noqa: B027 (a hook)
        """Device work of static shape, once per step after `plan`, which captured graphs may contain; nothing by default."""

    def plan_groups_in_graph(self, plans: Sequence[Any], model_follows: bool = False) -> None:
        """`plan_in_graph` of all plans of a step, one for each group of layers; backends may do it in fewer launches.

        Args:
            model_follows: the model's own kernels are launched before the first `forward`.
        """
        for plan in plans:
            self.plan_in_graph(plan)

    def graph_support(self) -> GraphSupport:
        """Which decode steps captured graphs may contain; at most what the capabilities allow.

        The graph of R decode requests contains `plan_in_graph` and `forward`; `plan` runs before the capture. It is replayed for any R
        requests, including dummies with one token in page 0, in the same tensors of the batch. Its plan must live as long as the graph, and
        one run before the capture must have compiled everything. `forward` may use host lengths only through `plan`, and these must be
        valid for every batch of the variant (see `graph_lengths`). `page_table` has its full width, with stale ids in columns that a
        request does not use.
        """
        return self.capabilities.graphs.get("decode", GraphSupport.NEVER)

    def for_graph(self, max_requests: int, max_pages: int) -> AttentionBackend:
        """The backend that plans and runs the graph of `max_requests` decode requests; by default this one.

        `max_pages` counts the pages of all requests, shared ones repeatedly: `max_requests` times the width of the page table is always
        enough.
        """
        return self

    def refresh(self, plan: Any, batch: Batch) -> None:  # noqa: B027 (a hook)
        """Host work before each replay of a graph that was captured with `plan`; nothing by default.

        `batch` has the step's host lengths, as many requests as the graph (including dummies), and the graph's tensors, already filled on
        the current stream, on which the graph is replayed next. Must not wait for the device.
        """

    def graph_lengths(self, requests: int, max_context: int, pool: KVPool) -> tuple[int, ...]:
        """Host lengths to capture with, the same for every request; each gives one graph, and `graph_variant` picks one for a batch.

        By default `max_context`, the most tokens that a request can have, because what a kernel derives from host lengths must be valid for
        all later batches.
        """
        return (max_context,)

    def graph_variant(self, batch: Batch, pool: KVPool) -> int:
        """The index in `graph_lengths(batch.num_requests, ...)` of the fastest graph for a batch, including dummies."""
        return 0

    def forward(
        self, plan: Any, layer_id: int, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, output: Tensor,
        *, save_kv_cache: bool, sinks: Tensor | None = None, bias: Tensor | None = None, lse_out: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Stores K and V if `save_kv_cache`, attends with the kernel for the batch's mode, and zeroes the padded rows."""
        self.store_and_attend(plan, AttentionCall(layer_id, spec, query, key, value, output, sinks, lse_out, bias), save_kv_cache)
        batch: Batch = plan.batch
        if batch.num_tokens < batch.num_rows:  # padding never carries NaN
            output[batch.num_tokens :].zero_()
            if lse_out is not None:
                lse_out[batch.num_tokens :].zero_()

    def store_and_attend(self, plan: Any, call: AttentionCall, store: bool) -> None:
        """`forward` for the real rows; K and V are stored if `store`."""
        if store:
            self.write_kv(plan, call)
        if plan.batch.mode is ForwardMode.DECODE:
            self.forward_decode(plan, call)
        else:
            self.forward_extend(plan, call)

    def attends_expanded(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether `forward` runs prompts of latent layers with keys and values computed from the rows, in place of PyTorch's attention. The
        layers have `spec`, or a spec that is not causal, with log-sum-exps, and the pool has pages of one token."""
        return False

    def forward_latent(self, context: ForwardContext, call: LatentCall) -> None:
        """Runs a latent layer, for backends with Feature.MLA. `forward` then gets one KV head of rows, whose values are the first
        `spec.rank` elements of their keys, also in the pool. Batch-invariant backends attend only to rows."""
        attend_to_latents(self, context, call, always_absorbed=self.deterministic)

    @abstractmethod
    def write_kv(self, plan: Any, call: AttentionCall) -> None:
        """Stores the real rows of this step's K and V in their slots."""

    @abstractmethod
    def forward_extend(self, plan: Any, call: AttentionCall) -> None:
        """Attends for every real row of a batch in any mode but DECODE; requests with one new token may be among the others."""

    @abstractmethod
    def forward_decode(self, plan: Any, call: AttentionCall) -> None:
        """Attends for every real row of a batch in which each request has one new token and a cached context."""


class StoringBackend(AttentionBackend):
    """Base of backends without their own kernel for the KV write. By default decode steps run as extend steps."""

    def write_kv(self, plan: Any, call: AttentionCall) -> None:
        store_kv(plan.pool, call.layer_id, call.key, call.value, plan.batch)

    def forward_decode(self, plan: Any, call: AttentionCall) -> None:
        self.forward_extend(plan, call)


class OnlyStores(StoringBackend):
    """Attends to nothing: for steps on fake tensors, in place of a backend whose kernels do not accept them.

    Args:
        kv: it stores K and V with the kernel of `StoringBackend`; all backends store latents with ours.
    """

    name, capabilities = "stores only", Capabilities(devices=frozenset(), dtypes=frozenset(), kv_dtypes=frozenset(), features=frozenset())
    compiles_ahead = True

    def __init__(self, *, kv: bool) -> None:
        super().__init__()
        self._kv = kv

    def plan(self, batch: Batch, pool: KVPool) -> SimpleNamespace:
        return SimpleNamespace(batch=batch, pool=pool)

    def write_kv(self, plan: Any, call: AttentionCall) -> None:
        if self._kv:
            super().write_kv(plan, call)

    def forward_extend(self, plan: Any, call: AttentionCall) -> None: ...


def slopes_of(spec: AttentionSpec, device: torch.device) -> Tensor | None:
    """[q_heads] float32, or None without ALiBi. Keep the result for each layer: creating it copies from the host."""
    if spec.alibi_slopes is None:
        return None
    return torch.tensor(spec.alibi_slopes, dtype=torch.float32).to(device, non_blocking=True)
