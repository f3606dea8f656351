"""TensorRT-LLM's decode kernels through FlashInfer, which read the batch's own tensors and share one workspace.

- XQA on SM90 serves decode only. On SM100 FlashInfer would run its trtllm-gen kernels, for prefill too; this project has not tested them,
  so they are refused.
- Latent attention, for Blackwell: decode steps in pages of 32 or 64. Its kernels read rows where they lie, pages any distance apart, but
  whole pages of them. The page table must cover whole blocks of 128 tokens of each request.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.backends.attention.base import AttentionCall
from paged_attn.backends.attention.capabilities import DECODE_GRAPHS, Capabilities, Feature, OneOf, Span
from paged_attn.backends.attention.decode_only.base import LATENT_DECODE, DecodeOnlyBackend, WorkspacePlan
from paged_attn.backends.attention.flashinfer.kinds import is_vectored
from paged_attn.backends.attention.flashinfer.launches import readable, writable
from paged_attn.backends.attention.flashinfer.wrappers import WrapperPool, announce, import_flashinfer
from paged_attn.backends.devices import architecture_of
from paged_attn.backends.needs import FLASHINFER, HALF, short_dtype

WORKSPACE = 128 << 20  # contains counters (8 MiB of XQA's) that must be zero at first; each launch leaves them zero
DTYPES = frozenset({torch.bfloat16})
BLOCK = 128  # tokens; the page table is padded to blocks of this many
KEY_DIMS = {512: 128, 256: 64}  # rank -> width of the models' keys, in the pairs that FlashInfer lists


class TrtllmBackend(DecodeOnlyBackend):
    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(deterministic=deterministic)
        self._module = import_flashinfer(self.name)
        self._buffers = WrapperPool()

    def plan(self, batch: Batch, pool: KVPool) -> WorkspacePlan:
        """Plans nothing on the host. Raises UnsupportedError: see `check_pool`."""
        self.check_once(pool)
        return WorkspacePlan(batch, pool, self._buffers.workspace(pool.device, WORKSPACE), batch.page_table)


class TrtllmMhaBackend(TrtllmBackend):
    """XQA decode; for prefill name another backend in front: backend="fa3,trtllm_mha"."""

    name, prefill_with = "trtllm_mha", "fa3"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=HALF,
        kv_dtypes=HALF,
        features=frozenset({Feature.WINDOW, Feature.SINKS}),
        architectures=frozenset({90}),
        head_dims=OneOf({64, 128, 256}),
        page_sizes=OneOf({16, 32, 64, 128}),
        group_sizes=Span(1, 16),
        graphs=DECODE_GRAPHS,
        requirements=(FLASHINFER,),
        note="XQA, decode only: use it as fa3,trtllm_mha; FlashInfer's trtllm-gen kernels for SM100 are not tested by this project",
        phases=frozenset({"decode"}),
    )

    def check_pool(self, pool: KVPool) -> None:
        """Checks for SM90, and that K and V have the same strides, in whole heads."""
        architecture = architecture_of(pool.device)
        if architecture is not None and architecture not in self.capabilities.architectures:
            raise UnsupportedError(
                f"trtllm_mha runs on SM90; got SM{architecture}: not tested on SM{architecture} by this project; take backend='auto'"
            )
        specs = {layer: spec for layer, spec in enumerate(pool.layers) if spec.by_backend}
        for layer, spec in specs.items():
            key, value = pool.key(layer), pool.value(layer)
            in_heads = not any(stride % spec.qk_head_dim for stride in key.stride()[:-1])  # the kernel divides them without checking
            if key.stride() != value.stride() or not in_heads or not (is_vectored(key) and is_vectored(value)):
                raise UnsupportedError(
                    f"trtllm_mha needs the same strides for K and V, in whole heads of {spec.qk_head_dim}; layer {layer} has "
                    f"{key.stride()} and {value.stride()}: layers of several head dims in one pool do not fit; take another backend"
                )
        for spec in specs.values():
            words = [f"head dim {spec.qk_head_dim}", f"group {spec.group_size}", f"page size {pool.page_size}", short_dtype(pool.dtype)]
            announce("XQA", *words, *["window"] * (spec.sliding_window is not None))

    def plan_in_graph(self, plan: WorkspacePlan) -> None:
        """Copies the page table if XQA cannot read it in place; a copy made in `plan` would be stale when a graph is replayed."""
        plan.page_table = plan.batch.page_table.contiguous()

    def forward_decode(self, plan: WorkspacePlan, call: AttentionCall) -> None:
        batch, spec = plan.batch, call.spec
        _check_call(spec, call, plan.pool)
        count = batch.num_requests
        query, output = call.query[:count], call.output[:count]
        target = writable(output, query.dtype)
        self._module.decode.trtllm_batch_decode_with_kv_cache(
            query=query if query.is_contiguous() and is_vectored(query) else query.clone(memory_format=torch.contiguous_format),
            kv_cache=(plan.pool.key(call.layer_id), plan.pool.value(call.layer_id)),
            workspace_buffer=plan.workspace,
            block_tables=plan.page_table,
            seq_lens=batch.seq_lens,
            max_seq_len=plan.page_table.shape[1] * batch.page_size,
            bmm1_scale=float(spec.scale),
            bmm2_scale=1.0,
            window_left=-1 if spec.sliding_window is None else spec.sliding_window - 1,
            out=target,
            sinks=None if call.sinks is None else call.sinks.float().contiguous(),
            kv_layout="NHD",
            backend="xqa",
        )
        if target is not output:
            output.copy_(target)


def _check_call(spec: AttentionSpec, call: AttentionCall, pool: KVPool) -> None:
    wrong = {
        "softcap": spec.softcap is not None,
        "chunk": spec.chunk is not None,
        "ALiBi": spec.alibi_slopes is not None,
        "biases": call.bias is not None,
        "log-sum-exp": call.lse_out is not None,
        f"queries of {call.query.dtype} for a KV pool of {pool.dtype}": call.query.dtype != pool.dtype,
    }
    if found := [what for what, present in wrong.items() if present]:
        raise UnsupportedError(
            f"trtllm_mha cannot run layer {call.layer_id} ({spec.describe()}): no {', no '.join(found)}; take another backend"
        )


class TrtllmMlaBackend(TrtllmBackend):
    """trtllm-gen decode over rows of latents; for prefill name another backend in front: backend="triton,trtllm_mla"."""

    name, prefill_with = "trtllm_mla", "triton"
    capabilities = replace(
        LATENT_DECODE,
        dtypes=DTYPES,
        kv_dtypes=DTYPES,
        architectures=frozenset({100, 103}),
        latent_dims=(OneOf(KEY_DIMS), OneOf({64})),
        page_sizes=OneOf({32, 64}),
        requirements=(FLASHINFER,),
        note="TensorRT-LLM's latent attention through flashinfer, decode only: use it as triton,trtllm_mla; tested against its signature, "
        "not yet run on a GPU by this project",
    )

    def check_pool(self, pool: KVPool) -> None:
        """Checks that the pool has only rows of latents, at multiples of 16 bytes."""
        for layer, spec in enumerate(pool.layers):
            if spec.by_backend and not (isinstance(spec, LatentSpec) and is_vectored(pool.key(layer))):
                raise UnsupportedError(
                    f"trtllm_mla reads rows of latents, 16 bytes at a time; layer {layer} ({spec.describe()}) has strides "
                    f"{pool.key(layer).stride()}: take another backend, such as 'triton'"
                )

    def plan_in_graph(self, plan: WorkspacePlan) -> None:
        table = plan.batch.page_table
        plan.page_table = F.pad(table, (0, -table.shape[1] % (BLOCK // plan.batch.page_size))).contiguous()

    def forward_decode(self, plan: WorkspacePlan, call: AttentionCall) -> None:
        batch, spec = plan.batch, call.spec
        assert isinstance(spec, LatentSpec)
        count = batch.num_requests
        query, output = readable(call.query[:count]), call.output[:count]
        target = writable(output, query.dtype)
        self._module.decode.trtllm_batch_decode_with_kv_cache_mla(
            query=query[:, None],
            kv_cache=plan.pool.key(call.layer_id)[:, :, 0],
            workspace_buffer=plan.workspace,
            qk_nope_head_dim=KEY_DIMS[spec.rank],
            kv_lora_rank=spec.rank,
            qk_rope_head_dim=spec.rotated,
            block_tables=plan.page_table,
            seq_lens=batch.seq_lens,
            max_seq_len=plan.page_table.shape[1] * batch.page_size,
            out=target[:, None],
            bmm1_scale=float(spec.scale),
            bmm2_scale=1.0,
            backend="trtllm-gen",
        )
        if target is not output:
            output.copy_(target)
