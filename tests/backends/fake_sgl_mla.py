"""sgl_kernel's kernels for latents in plain PyTorch: FlashMLA's two functions, and CUTLASS's two, with the signatures of 0.4.2.post2.

They check what the real ones check. CUTLASS's takes pages for adjacent, which the fake checks; both read what the tables and lengths on the
device say when they run, as a replayed graph does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.backends.flash_kernels import Rules, check, check_loads, paged_attention

RANK, ROTATED = 512, 64
PARTS = 7  # of a device that is not here


class FakeSglMla:
    """`calls` names the kernels that ran."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def get_mla_metadata(
        self, cache_seqlens: Tensor, num_q_tokens_per_head_k: int, num_heads_k: int, num_heads_q: int | None = None,
        is_fp8_kvcache: bool = False, topk: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The schedule holds the lengths that it was made for."""
        check(cache_seqlens.dtype == torch.int32 and cache_seqlens.is_contiguous(), "seqlens_k must have dtype int32")
        assert num_heads_k == 1 and num_heads_q is None and not is_fp8_kvcache and topk is None
        self.calls.append("schedule")
        schedule = torch.zeros(PARTS, 8, dtype=torch.int32)
        schedule[:, 0] = num_q_tokens_per_head_k
        return schedule, torch.cat((cache_seqlens.new_zeros(1), cache_seqlens))

    def flash_mla_with_kvcache(
        self, q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, head_dim_v: int, tile_scheduler_metadata: Tensor,
        num_splits: Tensor, softmax_scale: float | None = None, causal: bool = False, descale_q: Tensor | None = None,
        descale_k: Tensor | None = None, is_fp8_kvcache: bool = False, indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert descale_q is None and descale_k is None and not is_fp8_kvcache and indices is None and softmax_scale is not None
        batch, new, heads, width = q.shape
        check(q.dtype in (torch.bfloat16, torch.float16) and k_cache.dtype == q.dtype, "query and key must have the same dtype")
        check(block_table.dtype == torch.int32 and block_table.stride(-1) == 1, "block_table must have a contiguous last dimension")
        check(width == RANK + ROTATED and head_dim_v == RANK and new == 1 and causal, "head sizes")
        check(k_cache.shape[1:] == (64, 1, width), "page_block_size must be 64")
        check(block_table.shape[0] == cache_seqlens.shape[0] == batch, "batch")
        check_loads(q, k_cache)
        assert (tile_scheduler_metadata[:, 0] == heads).all() and num_splits[1:].equal(cache_seqlens), "a schedule of another step"
        self.calls.append("flash_mla")
        return _decode(q[:, 0], k_cache, block_table, cache_seqlens, softmax_scale)[:, None], torch.empty(batch, heads, 1)

    def cutlass_mla_get_workspace_size(self, max_seq_len: int, num_batches: int, sm_count: int = 0, num_kv_splits: int = 1) -> int:
        assert max_seq_len > 0 and num_batches > 0 and num_kv_splits == 1 and max_seq_len % 128 == 0
        return 256 * num_batches

    def cutlass_mla_decode(
        self, q_nope: Tensor, q_pe: Tensor, kv_c_and_k_pe_cache: Tensor, seq_lens: Tensor, page_table: Tensor, workspace: Tensor,
        sm_scale: float, num_kv_splits: int = 1,
    ) -> Tensor:  # fmt: skip
        count, heads, rank = q_nope.shape
        assert q_pe.shape == (count, heads, ROTATED) and rank == RANK and heads <= 128 and num_kv_splits == 1
        assert kv_c_and_k_pe_cache.shape[1:] == (128, RANK + ROTATED) and kv_c_and_k_pe_cache.is_contiguous(), "pages are adjacent"
        assert q_nope.dtype == q_pe.dtype == kv_c_and_k_pe_cache.dtype and q_nope.is_contiguous() and q_pe.is_contiguous()
        assert page_table.shape[0] == seq_lens.shape[0] == count and page_table.is_contiguous()
        assert page_table.dtype == seq_lens.dtype == torch.int32
        assert workspace.dtype == torch.uint8 and workspace.numel() >= 256 * count and type(sm_scale) is float
        self.calls.append("cutlass_mla")
        return _decode(torch.cat((q_nope, q_pe), -1), kv_c_and_k_pe_cache[:, :, None], page_table, seq_lens, sm_scale)


def _decode(query: Tensor, rows: Tensor, table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """query [requests, heads, 576], rows [pages, page_size, 1, 576]: [requests, heads, 512]."""
    result = query.new_empty((*query.shape[:2], RANK))
    paged_attention(query, rows, rows[..., :RANK], list(range(len(query) + 1)), lengths.tolist(), table, Rules(scale, True), result)
    return result


@contextmanager
def installed() -> Iterator[FakeSglMla]:
    """The package as `import sgl_kernel` finds it."""
    fake = FakeSglMla()
    package, flash_mla = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_mla")
    flash_mla.__dict__.update(get_mla_metadata=fake.get_mla_metadata, flash_mla_with_kvcache=fake.flash_mla_with_kvcache)
    package.__dict__.update(cutlass_mla_decode=fake.cutlass_mla_decode, cutlass_mla_get_workspace_size=fake.cutlass_mla_get_workspace_size)
    modules = {"sgl_kernel": package, "sgl_kernel.flash_mla": flash_mla, "sgl_kernel.flashmla_ops": ModuleType("sgl_kernel.flashmla_ops")}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield fake
