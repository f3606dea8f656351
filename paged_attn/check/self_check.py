"""The self-check: compares the rewritten graph with the traced one numerically before first use.

Each probe prompt runs alone through the traced graph; all of them run together, in chunks and decode steps, through the rewritten one.
Not only logits are compared, but every value between two pieces and what every op between them writes, each from the same inputs: so
errors do not add up, and the limit is what rounding does to that one part of the model, measured on the model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import without_attention
from paged_attn.calling.body import Body
from paged_attn.check.compare.against_model import check_against_model, check_rows
from paged_attn.check.compare.diagnosis import refusal
from paged_attn.check.compare.later_tokens import check_later_tokens
from paged_attn.check.compare.long_positions import check_long_positions
from paged_attn.check.compare.noise import Noise
from paged_attn.check.compare.overflow import naming_overflow
from paged_attn.check.compare.ragged import compare_ragged
from paged_attn.check.compare.suspects import unexplained
from paged_attn.check.compare.windows import Attention, check_windows
from paged_attn.check.runs.served import Original, Served, must_run
from paged_attn.check.runs.steps import ProbeSettings, others_for, probe_prompts, rare_ids, with_rare_ids
from paged_attn.check.runs.tapped import unchanged
from paged_attn.check.runs.traced_original import TracedOriginal
from paged_attn.check.runs.traced_served import TracedServed
from paged_attn.check.runs.truth import Truth
from paged_attn.compiled.graph_inputs import GraphInputs
from paged_attn.compiled.rewritten_graph import RewrittenGraph
from paged_attn.passes.fx.model_facts import is_vocabulary
from paged_attn.stopwatch import part

logger = logging.getLogger("paged_attn")
WARM_UP_ROWS = 2048


@part("self-check")
def self_check(
    compiled: RewrittenGraph,
    args: Sequence[Any],
    model_logits: Callable[[Tensor], Tensor] | None = None,
    model: nn.Module | None = None,
    settings: ProbeSettings | None = None,
    traced_args: Sequence[Any] | None = None,
) -> None:
    """Compares the two graphs of `compiled` on the parameters in `args`.

    Args:
        model_logits: the model's own logits, prompt [T] -> [T, vocabulary]; by default the traced graph's.
        model: for messages.
        settings: backend and pages.
        traced_args: the inputs of the traced graph, if they differ from those of the rewritten one (merged linears).

    Raises:
        UnsupportedError: the traced graph differs from the model, a later token changes an earlier row, or the rewritten graph differs. The
            message (`diagnosis.py`) names the op or part, the error, the allowed error and what to do.
    """
    started = time.perf_counter()
    inputs = GraphInputs(compiled.roles, args)
    with torch.no_grad():
        served = TracedServed(compiled, inputs, settings or ProbeSettings())
        traced = GraphInputs(compiled.roles, args if traced_args is None else traced_args)
        original = TracedOriginal(compiled, traced, served.boundaries)
        ids = next(a for a, role in zip(args, compiled.roles, strict=True) if role == "input_ids")
        num_ids = _num_ids(compiled, inputs, ids, original, model_logits)
        least = 1 if served.is_causal else original.min_tokens  # what a short prompt is padded with would be seen by all of it
        random = probe_prompts(ids.device, num_ids, compiled.max_positions, least)
        prompts = with_rare_ids(random, rare_ids((t for t in inputs.owned if isinstance(t, Tensor)), num_ids))
        truth = Truth(original, served.boundaries.all, prompts, others_for(prompts, compiled.max_positions))
        check_rows(prompts, truth.logits, inputs.takes_logits_rows)
        name = "the model" if model is None else type(model).__name__
        with naming_overflow(original, truth, name):
            noise = Noise(original, truth, served.is_causal, served.settings.length_borders)
            if model_logits is not None:
                check_against_model(model_logits, original, truth, name, served.settings)
            if compiled.pieces is not None and prompts[0].is_cuda:
                _warm_up(served, prompts[0].device, compiled.max_positions)
            check_served(served, original, truth, noise, partial(original.attention, truth), compiled.max_positions, model)
    logger.info("self-check passed in %.2f s", time.perf_counter() - started)


def check_served(
    served: Served, original: Original, truth: Truth, noise: Noise, attention: Attention, longest: int | None, model: nn.Module | None
) -> None:
    """The part of the check that rewritten and hooked models share. `longest`: the model's number of positions; `model`: for messages."""
    if served.is_causal:
        check_later_tokens(original, truth, noise, served.settings)
    check_long_positions(served, truth, longest, model)
    found = unexplained(compare_ragged(served, truth, noise), original, truth, noise, served.settings)
    if served.settings.fails(bool(found)):
        raise refusal(found[0], served, original, truth, noise)
    check_windows(served, attention, truth, noise, longest)


def _num_ids(
    compiled: RewrittenGraph, inputs: GraphInputs, ids: Tensor, original: Original, model_logits: Callable[[Tensor], Tensor] | None
) -> int:
    """How many token ids the model has: those of a `Body`, or as many as its logits if a table has that many rows, else up to the largest
    id of the call."""
    if isinstance(compiled.model, Body):
        return compiled.model.num_ids
    vocabulary = (model_logits or (lambda prompt: original.run(prompt, unchanged)))(ids.flatten()[:2]).shape[-1]
    has_table = any(isinstance(t, Tensor) and t.dim() == 2 and is_vocabulary(vocabulary, t.shape[0]) for t in inputs.owned)
    return vocabulary if has_table else int(ids.max()) + 1


@part("first run of the pieces")
def _warm_up(served: Served, device: torch.device, longest: int | None) -> None:
    """Runs all pieces on WARM_UP_ROWS rows, of as many requests as necessary.

    Inductor's kernels choose their configuration at their first run. The few rows of a check would choose one for the thousands of rows of
    a prompt, for which another may be 1.4 times as fast.

    Args:
        longest: the model's number of positions.
    """
    page_size = min(WARM_UP_ROWS, longest or WARM_UP_ROWS)
    batch = Batch.build([BatchRequest([0] * page_size, [1])] * (WARM_UP_ROWS // page_size), page_size, device)
    with without_attention(batch, served.kv_dtype), must_run("the compiled graph", f"{WARM_UP_ROWS} rows"):
        served.run_pieces(batch, unchanged)
