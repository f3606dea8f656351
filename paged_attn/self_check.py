"""The first use proves the rewrite on numbers: original and rewritten graph on the same ragged probe, and a causality test.

Each probe prompt is run alone through the original graph, and together with the others through the rewritten one, in two
steps: whole prompts and first chunks, then a decode row and a second chunk. Unused pages hold NaN.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paged_attn.attn_ops.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv_pool import KVPool
from paged_attn.backends.select import select_for_pool
from paged_attn.graph_inputs import GraphInputs
from paged_attn.layer_difference import first_layer_that_differs

if TYPE_CHECKING:
    from paged_attn.compiled_graph import CompiledGraph

logger = logging.getLogger("paged_attn")
PROMPTS = (5, 24, 13)
FIRST_STEP = (4, 11, 13)  # then a decode row, a second chunk, and nothing
PAGE_SIZE = 4
RELATIVE_TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-6}
LOW_PRECISION_TOLERANCE = 6e-2


def self_check(compiled: CompiledGraph, args: Sequence[Any]) -> None:
    """Compare the two graphs of `compiled` on the parameters in `args`.

    Raises:
        UnsupportedError: logits differ, naming the first layer that does; or a later token moves an earlier logit.
    """
    started = time.perf_counter()
    inputs = GraphInputs(compiled.roles, args)
    ids = next(a for a, role in zip(args, compiled.roles, strict=True) if role == "input_ids")
    prompts = _probe_prompts(ids)
    with torch.no_grad():
        alone = [run_alone(compiled, inputs, prompt) for prompt in prompts]
        _check_causality(compiled, inputs, prompts, alone)
        paged = _run_paged(compiled, inputs, prompts, alone[0].dtype)
    for prompt, expected, got in zip(prompts, alone, paged, strict=True):
        error = relative_error(expected, got)
        limit = RELATIVE_TOLERANCE.get(expected.dtype, LOW_PRECISION_TOLERANCE)
        if not error <= limit:
            layer = first_layer_that_differs(compiled, inputs, prompt, limit)
            raise UnsupportedError(
                f"self-check failed: on a probe prompt of {len(prompt)} tokens the rewritten graph's logits are off by {error:.2g} of their size "
                f"(allowed {limit:g}). {layer} This is a bug of paged_attn or a model that depends on more than its own prompt; "
                "please report it. Nothing was generated."
            )
    logger.info("self-check passed in %.2f s", time.perf_counter() - started)


def run_alone(compiled: CompiledGraph, inputs: GraphInputs, prompt: Tensor) -> Tensor:
    """Logits [T, vocabulary] of one prompt through the graph as it was traced."""
    rows = torch.arange(len(prompt), device=prompt.device)
    return logits_of(compiled.original.forward(*inputs.fill(prompt, rows, rows)))


def logits_of(output: Any) -> Tensor:
    """[N, vocabulary] from a graph's flat outputs: the first floating tensor [1, N, ...]."""
    tensors = output if isinstance(output, (tuple, list)) else (output,)
    logits: Tensor = next(t for t in tensors if isinstance(t, Tensor) and t.is_floating_point() and t.dim() >= 2)
    return logits[0] if logits.dim() == 3 else logits


def relative_error(expected: Tensor, got: Tensor) -> float:
    """Largest difference over the largest magnitude; for 16-bit types the median over rows, as routing may flip in a few."""
    difference = (expected.float() - got.float()).abs().amax(-1)
    size = expected.float().abs().amax(-1).clamp_min(1e-6)
    errors = difference / size
    return float(errors.max() if expected.dtype in RELATIVE_TOLERANCE else errors.nanmedian()) if not errors.isnan().any() else float("nan")


def _probe_prompts(like: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(20)
    top = int(like.max()) + 1  # ids that the model surely has
    return [torch.randint(0, max(top, 3), (n,), generator=generator).to(like.device) for n in PROMPTS]


def _check_causality(compiled: CompiledGraph, inputs: GraphInputs, prompts: list[Tensor], alone: list[Tensor]) -> None:
    if not all(spec.causal for spec in compiled.specs):
        return
    changed = prompts[1].clone()
    changed[-1] = (changed[-1] + 1) % (prompts[1].max() + 1)
    error = relative_error(alone[1][:-1], run_alone(compiled, inputs, changed)[:-1])
    if not error <= RELATIVE_TOLERANCE.get(alone[1].dtype, LOW_PRECISION_TOLERANCE):
        raise UnsupportedError(
            f"self-check failed: changing the last of {len(changed)} tokens moved earlier logits by {error:.2g} of their size, so the model is not "
            "causal outside its attention; it can not be generated from token by token."
        )


def _run_paged(compiled: CompiledGraph, inputs: GraphInputs, prompts: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    assert compiled.eager_paged is not None
    layers = compiled.specs
    pages = [-(-len(p) // PAGE_SIZE) for p in prompts]
    pool = KVPool(layers, 3 + sum(pages), PAGE_SIZE, _kv_dtype(inputs, dtype), prompts[0].device)
    pool.storage.fill_(float("nan"))
    free = list(range(2 + sum(pages), 1, -2)) + list(range(1 + sum(pages), 0, -2))  # shuffled and never in order
    tables = [[free.pop(0) for _ in range(n)] for n in pages]
    backend = select_for_pool("auto", pool).backend
    steps = [(0, n) for n in FIRST_STEP], [(n, len(p)) for n, p in zip(FIRST_STEP, prompts, strict=True)]
    if not all(spec.causal for spec in layers):
        steps = [(0, len(p)) for p in prompts], []
    results: list[list[Tensor]] = [[] for _ in prompts]
    for step in steps:
        active = [i for i, (start, end) in enumerate(step) if end > start]
        if not active:
            continue
        requests = [BatchRequest(prompts[i][slice(*step[i])].tolist(), tables[i], step[i][0], step[i][1] - step[i][0]) for i in active]
        batch = Batch.build(requests, PAGE_SIZE, prompts[0].device)
        with ForwardContext(batch, pool, backend):
            logits = logits_of(compiled.eager_paged.forward(*inputs.fill(batch.input_ids, batch.positions, batch.logits_rows)))
        for i, rows in zip(active, logits[: batch.num_logits].split([len(r.tokens) for r in requests]), strict=True):
            results[i].append(rows)
    return [torch.cat(parts) for parts in results]


def _kv_dtype(inputs: GraphInputs, logits_dtype: torch.dtype) -> torch.dtype:
    """The model's dtype: that of most parameters, as some models return float32 logits."""
    dtypes = [a.dtype for a in inputs.owned if isinstance(a, Tensor) and a.is_floating_point() and a.dim() >= 2]
    return max(set(dtypes), key=dtypes.count) if dtypes else logits_dtype
