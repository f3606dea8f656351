"""torch_native on the GPU against the reference on the CPU, and a step that never waits for the device."""

from __future__ import annotations

import pytest
import torch

from paged_attn import AttentionSpec, Batch, BatchRequest, KVPool, forward_context
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.backends.attention.torch_native import TorchNativeBackend

SPECS = {
    "causal": AttentionSpec(8, 2, 64, 64, 0.125),
    "window": AttentionSpec(8, 8, 64, 64, 0.125, sliding_window=9),
    "chunk": AttentionSpec(7, 1, 64, 32, 0.125, chunk=8),
    "softcap": AttentionSpec(4, 2, 32, 32, 0.2, softcap=20.0),
}
REQUESTS = [
    BatchRequest(range(1, 20), [7, 2, 9], 0),
    BatchRequest([5], [4, 1], 17),
    BatchRequest([5, 6, 7], [3, 8], 15),
    BatchRequest([9], [6], 0),
]


@pytest.mark.parametrize("name", SPECS)
def test_equals_the_reference(name: str) -> None:
    spec, results = SPECS[name], []
    generator = torch.Generator().manual_seed(3)
    rows = sum(len(r.tokens) for r in REQUESTS)
    recompute = torch.randn(10 * 16 * spec.num_kv_heads * (spec.qk_head_dim + spec.v_head_dim), generator=generator)
    q = torch.randn(rows, spec.num_q_heads, spec.qk_head_dim, generator=generator)
    k = torch.randn(rows, spec.num_kv_heads, spec.qk_head_dim, generator=generator)
    v = torch.randn(rows, spec.num_kv_heads, spec.v_head_dim, generator=generator)
    for device, backend in (("cpu", "reference"), ("cuda", "torch_native")):
        pool = KVPool([spec], 10, 16, torch.float32, device)
        pool.storage.copy_(recompute)
        batch = Batch.build(REQUESTS, 16, device)
        out = torch.full((rows, spec.num_q_heads, spec.v_head_dim), float("nan"), device=device)
        with forward_context(batch, pool, backend):
            UNIFIED_ATTENTION(q.to(device), k.to(device), v.to(device), out, 0, True)
        results.append(out.cpu())
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


def test_a_decode_step_does_not_synchronise() -> None:
    spec, backend = SPECS["window"], TorchNativeBackend()
    pool = KVPool([spec], 10, 16, torch.float32, "cuda")
    tensors = [torch.randn(2, h, 64, device="cuda") for h in (8, 8, 8)]
    out = torch.empty(2, 8, 64, device="cuda")
    requests = [BatchRequest([5], [4, 1], 17), BatchRequest([5], [3, 8], 20)]
    with forward_context(Batch.build(requests, 16, "cuda"), pool, backend):
        UNIFIED_ATTENTION(*tensors, out, 0, True)
    batch = Batch.build(requests, 16, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with forward_context(batch, pool, backend):
            UNIFIED_ATTENTION(*tensors, out, 0, True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
