"""CUTLASS's latent attention of sgl-kernel, for Blackwell: decode steps over rows of 512 + 64 in pages of 128.

Its kernel assumes that pages are adjacent, whatever their stride. So `adjacent_pages` gives it the whole pool from the layer's first row
on, in which one page of the pool counts as several, and the page table counts those. The kernel reads whole pages; heads are padded to 128
with copies of the queries.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.backends.attention.base import AttentionCall
from paged_attn.backends.attention.capabilities import OneOf, Span
from paged_attn.backends.attention.decode_only.base import LATENT_DECODE, DecodeOnlyBackend, WorkspacePlan
from paged_attn.backends.attention.flash_style import for_kernel
from paged_attn.backends.needs import SGL_KERNEL, importing

SPLITS = 1  # any other value is chosen from host lengths, which a captured graph would keep


class CutlassMlaBackend(DecodeOnlyBackend):
    """CUTLASS MLA; for prefill name another backend in front: backend="triton,cutlass_mla"."""

    name, prefill_with = "cutlass_mla", "triton"
    capabilities = replace(
        LATENT_DECODE,
        architectures=frozenset({100, 103}),
        page_sizes=OneOf({128}),
        group_sizes=Span(1, 128),
        requirements=(SGL_KERNEL,),
        note="CUTLASS latent attention of sgl-kernel, decode only: use it as triton,cutlass_mla; tested against its signature, not yet run "
        "on a GPU by this project",
    )

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(deterministic=deterministic)
        with importing(self.name, "sgl_kernel with cutlass_mla_decode", *self.capabilities.requirements):
            module = importlib.import_module("sgl_kernel")
            self._attend, self._workspace_bytes = module.cutlass_mla_decode, module.cutlass_mla_get_workspace_size
        self._workspaces: list[Tensor] = []  # the last is in use; captured graphs may still use the others

    def plan(self, batch: Batch, pool: KVPool) -> WorkspacePlan:
        """Creates only a workspace; the page table will count adjacent pages. Raises UnsupportedError: see `check_pool`."""
        workspace = self._workspace(batch) if batch.num_requests else batch.page_table.new_empty(0, dtype=torch.uint8)
        self.check_once(pool)
        return WorkspacePlan(batch, pool, workspace, batch.page_table)

    def check_pool(self, pool: KVPool) -> None:
        """Checks that a pool consists only of such rows."""
        pages_in_page(pool)

    def plan_in_graph(self, plan: WorkspacePlan) -> None:
        plan.page_table = plan.batch.page_table * pages_in_page(plan.pool)

    def forward_decode(self, plan: WorkspacePlan, call: AttentionCall) -> None:
        batch, rows, spec = plan.batch, adjacent_pages(plan.pool, call.layer_id), call.spec
        count, rank = batch.num_requests, spec.v_head_dim
        query = for_kernel(call.query[:count], rows.dtype)
        latent, rotated = (part.contiguous() for part in (query[..., :rank], query[..., rank:]))
        result = self._attend(latent, rotated, rows, batch.seq_lens, plan.page_table, plan.workspace, spec.scale, SPLITS)
        call.output[:count].copy_(result)

    def _workspace(self, batch: Batch) -> Tensor:
        """Reused between steps, since a captured graph keeps the address."""
        table = batch.page_table
        size = self._workspace_bytes(table.shape[1] * batch.page_size, batch.num_requests, num_kv_splits=SPLITS)
        if not self._workspaces or self._workspaces[-1].numel() < size or self._workspaces[-1].device != table.device:
            self._workspaces.append(torch.empty(size, dtype=torch.uint8, device=table.device))
        return self._workspaces[-1]


def pages_in_page(pool: KVPool) -> int:
    """How many pages of one layer are as large as a page of the pool.

    Raises:
        UnsupportedError: not a whole number, or some layer has other rows.
    """
    widths = {spec.qk_head_dim if isinstance(spec, LatentSpec) else 0 for spec in pool.layers if spec.by_backend}
    width = max(widths)
    if len(widths) > 1 or not width or pool.page_elements % (width * pool.page_size):
        raise UnsupportedError(
            "cutlass_mla assumes that the pages of a layer are adjacent, so a pool may contain only rows of one width; got layers of "
            f"{', '.join(sorted({spec.describe() for spec in pool.layers}))}: take another backend, such as 'triton'"
        )
    return pool.page_elements // (width * pool.page_size)


def adjacent_pages(pool: KVPool, layer_id: int) -> Tensor:
    """[pages, page_size, width] of the pool from a layer's first row on; every `pages_in_page`-th belongs to the layer."""
    rows = pool.key(layer_id)
    _, size, _, width = rows.shape
    return rows.as_strided(((pool.num_pages - 1) * pages_in_page(pool) + 1, size, width), (size * width, width, 1))
