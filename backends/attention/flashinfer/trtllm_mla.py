"""TensorRT-LLM's latent attention through FlashInfer, for Blackwell: decode steps in pages of 32 or 64.

Its kernels read rows where they lie, pages any distance apart, but whole pages of them. The page table must cover whole blocks of 128
tokens of each request.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.backends.attention.base import AttentionCall
from paged_attn.backends.attention.capabilities import DECODE_GRAPHS, LATENTS_ONLY, Capabilities, Feature, OneOf
from paged_attn.backends.attention.decode_only.base import WorkspacePlan
from paged_attn.backends.attention.flashinfer.kinds import is_vectored
from paged_attn.backends.attention.flashinfer.launches import readable, writable
from paged_attn.backends.attention.flashinfer.trtllm import TrtllmBackend
from paged_attn.backends.needs import FLASHINFER

DTYPES = frozenset({torch.bfloat16})
BLOCK = 128  # tokens; the page table is padded to blocks of this many
KEY_DIMS = {512: 128, 256: 64}  # rank -> width of the models' keys, in the pairs that FlashInfer lists


class TrtllmMlaBackend(TrtllmBackend):
    """trtllm-gen decode over rows of latents; for prefill name another backend in front: backend="triton,trtllm_mla"."""

    name, prefill_with = "trtllm_mla", "triton"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=DTYPES,
        kv_dtypes=DTYPES,
        features=frozenset({Feature.MLA}),
        architectures=frozenset({100, 103}),
        head_dims=LATENTS_ONLY,
        latent_dims=(OneOf(KEY_DIMS), OneOf({64})),
        page_sizes=OneOf({32, 64}),
        graphs=DECODE_GRAPHS,
        requirements=(FLASHINFER,),
        note="TensorRT-LLM's latent attention through flashinfer, decode only: use it as triton,trtllm_mla; tested against its signature, "
        "not yet run on a GPU by this project",
        phases=frozenset({"decode"}),
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
