"""Common code of TensorRT-LLM's decode kernels, which read the batch's own tensors and share one workspace."""

from __future__ import annotations

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.backends.attention.decode_only.base import DecodeOnlyBackend, WorkspacePlan
from paged_attn.backends.attention.flashinfer.wrappers import WrapperPool, import_flashinfer

WORKSPACE = 128 << 20  # contains counters (8 MiB of XQA's) that must be zero at first; each launch leaves them zero


class TrtllmBackend(DecodeOnlyBackend):
    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(deterministic=deterministic)
        self._module = import_flashinfer(self.name)
        self._buffers = WrapperPool()

    def plan(self, batch: Batch, pool: KVPool) -> WorkspacePlan:
        """Plans nothing on the host. Raises UnsupportedError: see `check_pool`."""
        self.check_once(pool)
        return WorkspacePlan(batch, pool, self._buffers.workspace(pool.device, WORKSPACE), batch.page_table)
