"""TensorRT-LLM's decode kernels through FlashInfer: XQA on SM90.

XQA serves decode only. On SM100 FlashInfer would run its trtllm-gen kernels, for prefill too; this project has not tested them, so they
are refused.
"""

from __future__ import annotations

import torch

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.base import AttentionCall
from paged_attn.backends.attention.capabilities import DECODE_GRAPHS, Capabilities, Feature, OneOf, Span
from paged_attn.backends.attention.decode_only.base import WorkspacePlan
from paged_attn.backends.attention.flashinfer.kinds import is_vectored
from paged_attn.backends.attention.flashinfer.launches import writable
from paged_attn.backends.attention.flashinfer.trtllm import TrtllmBackend
from paged_attn.backends.attention.flashinfer.wrappers import announce
from paged_attn.backends.devices import architecture_of
from paged_attn.backends.needs import FLASHINFER, HALF, short_dtype


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
