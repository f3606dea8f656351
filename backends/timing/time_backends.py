"""Times attention backends side by side: the same inputs, each checked first, in turns, as CUDA graphs.

    problem = TimedProblem("decode", ((4095, 1),) * 64)
    time_backends({"triton": TritonBackend(), "fa3": FA3Backend()}, problem)["triton"].microseconds

The inputs of a problem are several layers of one page-major pool, each with its own queries, so that together their KV exceeds the L2 cache
several times; one pass runs them all, as the layers of a model would run. A time is that of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paged_attn.attn_ops.current_device import current_device
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.devices import default_device
from paged_attn.backends.timing.inputs import Inputs
from paged_attn.backends.timing.problem import TimedProblem
from paged_attn.backends.timing.run import Timing, WrongResultError, time_all

__all__ = ["TimedProblem", "Timing", "time_backends"]

# Largest error of a row, relative to the row: explained by rounding inputs and probabilities to the dtype.
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
SCORE_BYTES = 1 << 30


def time_backends(
    backends: Mapping[str, AttentionBackend],
    problem: TimedProblem,
    *,
    min_ms: float = 100,
    in_graph_plan: bool = False,
    with_write: bool = False,
    device: torch.device | str | None = None,
) -> dict[str, Timing]:
    """A timing for each backend, in the given order; one that does not fit, fails, or computes wrong results gets an error instead.

    Args:
        min_ms: about how long each backend is sampled.
        in_graph_plan: also time `plan_in_graph`, once per pass over all layers; otherwise it runs once, before.
        with_write: also store K and V of the new tokens in the pool; otherwise they are already there.
        device: by default the GPU if there is one. Without a GPU there are no graphs, and times are those of a plain loop.
    """
    inputs = Inputs.make(problem, default_device() if device is None else device)
    with current_device(inputs.device):
        inputs.store_new()
        expected = {layer: row_attention(inputs, layer) for layer in sorted({0, inputs.num_sets - 1})}

        def prepare(backend: AttentionBackend) -> tuple[Callable[[], None], float]:
            plan = backend.plan(inputs.batch, inputs.pool)
            backend.plan_in_graph(plan)

            def one_pass() -> None:
                if in_graph_plan:
                    backend.plan_in_graph(plan)
                for layer, spec in enumerate(inputs.pool.layers):
                    operands = (inputs.query[layer], inputs.key[layer], inputs.value[layer], inputs.output[layer])
                    backend.forward(plan, layer, spec, *operands, save_kv_cache=with_write, sinks=inputs.sinks)

            if with_write:
                inputs.poison_new()
            inputs.output.fill_(float("nan"))
            one_pass()
            wrong = inputs.num_wrong()
            inputs.store_new()  # in case a backend overwrote them
            return one_pass, _checked(inputs, expected, wrong)

        return time_all(backends, inputs, prepare, min_ms, problem.bytes_moved(with_write), problem.flops)


def _checked(inputs: Inputs, expected: Mapping[int, Tensor], wrong_slots: int) -> float:
    if wrong_slots:
        raise WrongResultError(f"K or V of new tokens is not in the pool in {wrong_slots} places")
    found = {layer: relative_error(inputs.output[layer], rows) for layer, rows in expected.items()}
    tolerance = TOLERANCES[inputs.problem.dtype]
    for layer, error in found.items():
        if not error <= tolerance:  # true for NaN
            raise WrongResultError(
                f"relative error {error:.3g} in layer {layer} against the float32 reference; allowed is {tolerance:g}, so it was not timed"
            )
    return max(found.values())


def row_attention(inputs: Inputs, layer: int) -> Tensor:
    """The expected output of `layer`: [T, q_heads, v_dim] float32, from the K and V in the pool. Shares no code with any backend."""
    batch, spec, results, row = inputs.batch, inputs.pool.layers[layer], [], 0
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # not TF32
    try:
        for request, (new, length) in enumerate(zip(batch.query_lens_host, batch.seq_lens_host, strict=True)):
            pages = batch.page_table[request, : -(-length // batch.page_size)].long()
            # [kv_heads, length, dim]
            keys, values = (pool[pages].flatten(0, 1)[:length].transpose(0, 1).float()
                            for pool in (inputs.pool.key(layer), inputs.pool.value(layer)))  # fmt: skip
            query = inputs.query[layer, row : row + new]
            step = max(1, SCORE_BYTES // (4 * 4 * spec.num_q_heads * length))  # about four tensors of scores
            for start in range(0, new, step):
                some = query[start : start + step].float()
                results.append(_attention(spec, some, keys, values, length - new + start, inputs.sinks))
            row += new
    finally:
        torch.set_float32_matmul_precision(precision)
    return torch.cat(results)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest error of a row [.., dim], relative to its norm (at least a tenth of the rows' mean norm); NaN if there is any NaN."""
    norm = expected.norm(dim=-1)
    return float(((actual.float() - expected).norm(dim=-1) / norm.clamp(min=norm.mean() / 10)).max())


def _attention(spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor, first: int, sinks: Tensor | None) -> Tensor:
    """query [Q, q_heads, dim] at positions first, first + 1, ...; keys and values [kv_heads, K, dim]."""
    count, heads = query.shape[0], (spec.num_kv_heads, spec.group_size)
    grouped = query.permute(1, 0, 2).reshape(heads[0], heads[1] * count, -1)
    scores = (grouped @ keys.transpose(1, 2)).view(*heads, count, -1) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    i = torch.arange(first, first + count, device=query.device)[:, None]
    j = torch.arange(keys.shape[1], device=query.device)
    if spec.alibi_slopes is not None:
        scores = scores + scores.new_tensor(spec.alibi_slopes).view(*heads, 1, 1) * (j - i)
    hidden = torch.zeros_like(i + j, dtype=torch.bool)
    if spec.causal:
        hidden = hidden | (j > i)
    if spec.sliding_window is not None:
        hidden = hidden | (j <= i - spec.sliding_window)
    if spec.window_ahead is not None:
        hidden = hidden | (j >= i + spec.window_ahead)
    if spec.chunk is not None:
        hidden = hidden | (i // spec.chunk != j // spec.chunk)
    scores = scores.masked_fill(hidden, float("-inf"))
    total = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float().view(*heads, 1, 1))
    weights = torch.exp(scores - total).view(heads[0], heads[1] * count, -1)
    return (weights @ values).view(*heads, count, -1).flatten(0, 1).transpose(0, 1)
