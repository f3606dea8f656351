"""Windows and chunks that are longer than the probe prompts: each kind of attention alone, on as many tokens as show where they end.

Queries, keys and values are rows that the model computed for a probe prompt, redrawn as often as necessary. The model's own
attention, mask and all, gets them as one sequence; the paged op in chunks and a decode step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.selection.select import select_for_pool
from paged_attn.check.compare.noise import Noise
from paged_attn.check.compare.ragged import RowsOfStep
from paged_attn.check.runs.served import Served
from paged_attn.check.runs.steps import LONGEST, Part, ProbeSettings, Step, Steps
from paged_attn.check.runs.truth import Truth
from paged_attn.passes.report import LayerReport
from paged_attn.tolerances import MULTIPLE, row_errors

logger = logging.getLogger("paged_attn")
BEYOND = 9  # tokens beyond the end of a window or chunk
MOST_SCORE_BYTES = 4 << 30  # for the model's scores [heads, T, T] in float32
MOST_CPU_OPERATIONS = 1e12  # a few seconds on two cores

# (layer, rows [T] of the longest probe prompt to run as one sequence, the op's operands for that prompt, whether to compute in wider
# numbers) -> the output of the model's own attention [T, heads, v_dim], or why it cannot be computed.
Attention = Callable[[LayerReport, Tensor, dict[str, Tensor], bool], Tensor | str]


def check_windows(served: Served, attention: Attention, truth: Truth, noise: Noise, longest: int | None) -> None:
    """Checks the first layer of every kind that has a window or chunk. `longest`: the model's number of positions. Raises UnsupportedError:
    the paged op's output differs from that of the model's attention for some token, on this rank or on another."""
    seen: set[AttentionSpec] = set()
    for layer_id, boundary in sorted(served.by_layer.items()):
        spec, tokens = served.specs[layer_id], tokens_to_show(served.specs[layer_id])
        kind = replace(spec, kv_layer=0, module="")
        if kind in seen or boundary.layer is None or tokens <= len(truth.prompts[LONGEST]) or (longest is not None and tokens > longest):
            continue  # the probe prompts show it, or no request is long enough
        seen.add(kind)
        reason, wrong = _too_large(spec, tokens, truth.prompts[LONGEST].device), ""
        if not served.settings.any_rank(bool(reason)):  # the check needs all ranks
            reason, wrong = _check(served, attention, truth, noise, boundary.layer, tokens)
        if served.settings.fails(bool(wrong)):
            raise UnsupportedError(wrong)
        if reason:
            logger.info("where the window of %s ends was proved on its mask only: %s", spec.module or f"layer {layer_id}", reason)


def tokens_to_show(spec: AttentionSpec) -> int:
    """How many tokens show where a layer's window and chunk end; 0 for a layer without."""
    end = max(spec.sliding_window or 0, spec.window_ahead or 0, spec.chunk or 0)
    return end + BEYOND if end else 0


def _too_large(spec: AttentionSpec, tokens: int, device: torch.device) -> str:
    scores = 4 * spec.num_q_heads * tokens**2
    operations = scores * (spec.qk_head_dim + spec.v_head_dim) / 2
    if scores > MOST_SCORE_BYTES:
        return f"the scores of {tokens} tokens take {scores >> 20:,} MiB"
    if device.type == "cpu" and operations > MOST_CPU_OPERATIONS:
        return f"{tokens} tokens take {operations:.1e} operations on a CPU"
    return ""


def _check(served: Served, attention: Attention, truth: Truth, noise: Noise, layer: LayerReport, tokens: int) -> tuple[str, str]:
    """(why the check was impossible or "", what is wrong or "")."""
    prompt = truth.prompts[LONGEST]
    steps = Steps(served.specs, truth.prompts, served.kv_dtype, served.recurrent, served.settings)
    step = Step("one whole prompt", (Part(LONGEST, 0, len(prompt)),))
    with steps.context(step) as context:
        given = served.operands(context.batch, RowsOfStep(step, truth, noise).visit, layer.layer_id)
    if not given:
        return "the op is given no keys of its own", ""
    generator = torch.Generator().manual_seed(7)
    chosen = torch.randint(0, len(prompt), (tokens,), generator=generator).to(prompt.device)
    expected = attention(layer, chosen, given, False)
    if isinstance(expected, str):
        return expected, ""
    got = attend_in_steps(layer.spec, given, chosen, served.kv_dtype, served.settings)
    errors = row_errors(expected, got)
    limits = torch.full_like(errors, noise.limit(layer.original_node))
    if served.settings.any_rank(not bool((errors <= limits).all())):  # with more keys than a probe prompt, rounding may do more
        exact = attention(layer, chosen, given, True)
        assert isinstance(exact, Tensor)
        limits = torch.maximum(limits, MULTIPLE * row_errors(exact, expected))
    if not bool((errors <= limits).all()):
        token = int(torch.nonzero(~(errors <= limits))[0])
        return "", (
            f"self-check failed: with {tokens} tokens, the attention of layer {layer.layer_id} ({layer.spec.module or 'module unknown'}: "
            f"{layer.spec.describe()}) gives token {token + 1} another output than the model's: off by {errors[token]:.2g} of its size "
            f"(allowed {limits[token]:.2g}). Name another backend, such as backend='torch_native', and please report this."
        )
    return "", ""


def attend_in_steps(
    spec: AttentionSpec, given: dict[str, Tensor], chosen: Tensor, kv_dtype: torch.dtype, settings: ProbeSettings
) -> Tensor:
    """The paged op on these rows [T] of its operands as one request, in two chunks and a decode step (in one step if not causal):
    [T, heads, v_dim]."""
    rows = [given[name][chosen] for name in ("query", "key", "value")]
    more = {name: given[name] for name in ("sinks", "bias") if name in given}
    tokens, page_size = len(chosen), settings.page_size
    pages = -(-tokens // page_size)
    pool = KVPool([replace(spec, kv_layer=0)], pages + 2, page_size, kv_dtype, chosen.device)
    pool.storage.fill_(float("nan"))
    backend = select_for_pool(settings.backend, pool, deterministic=settings.deterministic).backend
    table, results = list(range(pages + 1, 1, -1)), []
    ends = (tokens // 2, tokens - 1, tokens) if spec.causal else (tokens,)
    for start, end in pairwise((0, *ends)):
        batch = Batch.build([BatchRequest([1] * (end - start), table, start)], page_size, chosen.device)
        padded = [torch.cat([each[start:end], each[:1].expand(batch.num_rows - end + start, -1, -1)]) for each in rows]
        output = padded[0].new_empty((batch.num_rows, spec.num_q_heads, spec.v_head_dim))
        with ForwardContext(batch, pool, backend):
            UNIFIED_ATTENTION(*padded, output, 0, True, **more)
        results.append(output[: end - start])
    return torch.cat(results)
