"""The smoke test: one tiny ragged problem, run by an attention backend on its device and by the float32 reference on the CPU."""

from __future__ import annotations

import sys
from itertools import product

import torch

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.latent import HeadRows, LatentSpec
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.capabilities import Capabilities, Problem, unmet
from paged_attn.backends.attention.reference import ReferenceBackend
from paged_attn.backends.devices import architecture_of, device_word
from paged_attn.backends.selection.registry import backend_class
from paged_attn.forward import forward_context

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 1e-2}
LENGTHS = {"extend": ((0, 37), (33, 20), (49, 1)), "decode": ((49, 1), (16, 1), (63, 1))}  # (cached, new) of each request
NUM_PAGES = 200
SPECS = (
    *(AttentionSpec(8, 2, dim, dim, dim**-0.5) for dim in (64, 128)),
    LatentSpec(8, 1, 576, 512, 0.07, rotated=64, key_dim=128, value_dim=128, keys=HeadRows(0, 256), values=HeadRows(128, 256)),
)


def smoke_problem(capabilities: Capabilities, device: torch.device) -> tuple[AttentionSpec, torch.dtype, int] | None:
    """A layer, a dtype and a page size that a backend takes, or None if there is none among a few usual ones."""
    dtypes = (torch.float32,) if device.type == "cpu" else (torch.bfloat16, torch.float16, torch.float32)
    for dtype, page_size, spec in product(dtypes, (16, 64, 256, 1, 128), SPECS):
        problem = Problem(spec, dtype, dtype, page_size, device_word(device), architecture_of(device), phases=capabilities.phases)
        if not unmet(capabilities, problem):
            return spec, dtype, page_size
    return None


def smoke_error(backend: AttentionBackend, device: torch.device) -> tuple[float, float]:
    """Largest difference from the reference, and what is allowed.

    Raises:
        ValueError: the backend takes none of the problems that are tried.
    """
    chosen = smoke_problem(backend.capabilities, device)
    if chosen is None:
        raise ValueError("none of the usual dtypes, page sizes and head dims fits")
    spec, dtype, page_size = chosen
    errors = []
    for phase in sorted(backend.capabilities.phases):
        batch = _batch(phase, page_size)
        draw = torch.Generator().manual_seed(0)
        heads = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
        inputs = [torch.randn(batch.num_rows, n, spec.qk_head_dim, generator=draw).to(dtype) for n in heads]
        if isinstance(spec, LatentSpec):
            inputs[2] = inputs[1][..., : spec.rank]  # as in the pool: the step's rows are keys and values
        stored = torch.randn(NUM_PAGES * page_size * spec.kv_elements, generator=draw).to(dtype)
        expected = _run(ReferenceBackend(), spec, page_size, phase, [t.float() for t in inputs], stored.float())
        got = _run(backend, spec, page_size, phase, [t.to(device) for t in inputs], stored.to(device))
        errors.append(float((expected - got.float().cpu()).abs().max()))
    return max(errors) if all(error == error for error in errors) else float("nan"), TOLERANCES[dtype]


def _batch(phase: str, page_size: int, device: torch.device | str = "cpu") -> Batch:
    """Pages in descending order, so that neighbours in a request are not neighbours in the pool."""
    free = list(range(1, NUM_PAGES))
    requests = []
    for cached, new in LENGTHS[phase]:
        pages = [free.pop() for _ in range(-(-(cached + new) // page_size))]
        requests.append(BatchRequest([0] * new, pages, cached))
    return Batch.build(requests, page_size, device)


def _run(
    backend: AttentionBackend, spec: AttentionSpec, page_size: int, phase: str, inputs: list[torch.Tensor], stored: torch.Tensor
) -> torch.Tensor:
    pool = KVPool([spec], NUM_PAGES, page_size, stored.dtype, stored.device)
    pool.storage.copy_(stored)
    batch = _batch(phase, page_size, stored.device)
    query = inputs[0]
    output = query.new_full((*query.shape[:2], spec.v_head_dim), float("nan"))
    with torch.no_grad(), forward_context(batch, pool, backend):
        UNIFIED_ATTENTION(*inputs, output, 0, True)
    return output[: batch.num_tokens]


if __name__ == "__main__":  # in a separate process: a failing kernel may take the CUDA context with it
    print(*smoke_error(backend_class(sys.argv[1])(), torch.device(sys.argv[2])))
