"""The contract of an attention backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, ForwardMode
from paged_attn.attn_ops.context import Backend, ForwardContext
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
    If another op wrote this step's K and V (save_kv_cache=False), only the pool has them: key is then not rotated.
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

    A backend writes only `output` (and lse_out) of a call, all T rows of it: rows from `batch.num_tokens` on are zeros, and no padded
    row or unused page may influence a real one.

    Args:
        deterministic: a row's result must be bitwise the same whatever else is in the batch (batch-invariant kernels); asked only of
            backends whose capabilities hold Feature.DETERMINISTIC.

    Raises:
        UnsupportedError: deterministic=True for any other backend.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    compiles_ahead: ClassVar[bool] = False  # all that `plan`, `plan_in_graph` and `forward` launch goes through `backends.compiling`

    def __init__(self, *, deterministic: bool = False) -> None:
        if deterministic and Feature.DETERMINISTIC not in self.capabilities.features:
            raise UnsupportedError(
                f"{self.name} is not batch-invariant; name another backend, such as 'triton', or leave deterministic off"
            )
        self.deterministic = deterministic

    def compiles_steps_ahead(self, mode: ForwardMode) -> bool:
        """`compiles_ahead` of what serves such steps."""
        return self.compiles_ahead

    def while_compiling_ahead(self) -> Backend:
        """What runs such steps on fake tensors: this one, or what is left of it without kernels that fake tensors cannot be given."""
        return self

    @abstractmethod
    def plan(self, batch: Batch, pool: KVPool) -> Any:
        """Host work, once per step and never per layer. Must not wait for the device."""

    def plan_in_graph(self, plan: Any) -> None:  # noqa: B027 (a hook)
        """Device work of static shape, once per step after `plan`, that a captured graph may hold; nothing by default."""

    def graph_support(self) -> GraphSupport:
        """Which decode steps a captured graph may hold; at most what the capabilities say.

        The graph of R decode requests holds `plan_in_graph` and `forward`; `plan` ran before it. It is replayed for any R requests, dummies
        with one token in page 0 among them, in the same tensors of the batch. Its plan must live as long as it does, and one
        run outside the capture must have compiled what it needs. All that `forward` may take from host lengths is what `plan` took, and
        that must hold for every batch of the variant (see `graph_lengths`). `page_table` has its full width, and stale ids in what a
        request does not use.
        """
        return self.capabilities.graphs.get("decode", GraphSupport.NEVER)

    def for_graph(self, max_requests: int, max_pages: int) -> AttentionBackend:
        """The backend that the graph of `max_requests` decode requests plans and runs with; by default this one.

        `max_pages` counts the pages of all requests together, each as often as it is listed: `max_requests` times the width of the page
        table is always enough.
        """
        return self

    def refresh(self, plan: Any, batch: Batch) -> None:  # noqa: B027 (a hook)
        """Host work before each replay of a graph that was captured with `plan`; nothing by default.

        `batch` has the step's own host lengths, as many requests as the graph, dummies included, and the graph's tensors, already filled
        on the current stream, on which the graph is replayed next. Must not wait for the device.
        """

    def graph_lengths(self, requests: int, max_context: int, pool: KVPool) -> tuple[int, ...]:
        """Host lengths to capture at, of every request alike; each makes one graph, and `graph_variant` says which of them serves a batch.

        By default `max_context`, the most tokens that a request may ever have, because what a kernel takes from host lengths must hold for
        all batches to come.
        """
        return (max_context,)

    def graph_variant(self, batch: Batch, pool: KVPool) -> int:
        """The index in `graph_lengths(batch.num_requests, ...)` of the graph that is fastest for a batch, dummies included."""
        return 0

    def forward(
        self, plan: Any, layer_id: int, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, output: Tensor,
        *, save_kv_cache: bool, sinks: Tensor | None = None, bias: Tensor | None = None, lse_out: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Store K and V if asked, attend with the kernel of the batch's mode, and zero the padded rows."""
        call = AttentionCall(layer_id, spec, query, key, value, output, sinks, lse_out, bias)
        batch: Batch = plan.batch
        if save_kv_cache:
            self.write_kv(plan, call)
        if batch.mode is ForwardMode.DECODE:
            self.forward_decode(plan, call)
        else:
            self.forward_extend(plan, call)
        zero_padding(batch, output, lse_out)

    def attends_expanded(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether prompts of latent layers shall come to `forward` with keys and values made of their rows, as layers of `spec`, or of
        one that is not causal, in a pool with pages of one token, with log-sum-exps; and not go to PyTorch's attention."""
        return False

    def forward_latent(self, context: ForwardContext, call: LatentCall) -> None:
        """A latent layer of the step, for backends with Feature.MLA: what `forward` is then given is one KV head of rows, whose values are
        the first `spec.rank` elements of their keys, in the pool as well. Batch-invariant backends attend to rows alone."""
        attend_to_latents(self, context, call, always_absorbed=self.deterministic)

    @abstractmethod
    def write_kv(self, plan: Any, call: AttentionCall) -> None:
        """Store the real rows of this step's K and V in their slots."""

    @abstractmethod
    def forward_extend(self, plan: Any, call: AttentionCall) -> None:
        """Attend for every real row of a batch in any mode but DECODE; requests with one new token may be among the others."""

    @abstractmethod
    def forward_decode(self, plan: Any, call: AttentionCall) -> None:
        """Attend for every real row of a batch in which each request has one new token and a cached context."""


class StoringBackend(AttentionBackend):
    """Base of backends without a kernel of their own for the KV write. Decode steps are one more extension unless they say otherwise."""

    def write_kv(self, plan: Any, call: AttentionCall) -> None:
        store_kv(plan.pool, call.layer_id, call.key, call.value, plan.batch)

    def forward_decode(self, plan: Any, call: AttentionCall) -> None:
        self.forward_extend(plan, call)


def zero_padding(batch: Batch, output: Tensor, lse_out: Tensor | None) -> None:
    """Zero the rows past the real tokens: padding never carries NaN."""
    if batch.num_tokens < batch.num_rows:
        output[batch.num_tokens :].zero_()
        if lse_out is not None:
            lse_out[batch.num_tokens :].zero_()


def slopes_of(spec: AttentionSpec, device: torch.device) -> Tensor | None:
    """[q_heads] float32, or None without ALiBi. To be kept per layer: making it copies from the host."""
    if spec.alibi_slopes is None:
        return None
    return torch.tensor(spec.alibi_slopes, dtype=torch.float32).to(device, non_blocking=True)
