"""The first use proves the rewrite on numbers: each probe prompt alone through the original graph, all together through the
rewritten one, and two tests that a later token moves no earlier logit: another token, and one at the last position."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.batch import Batch
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.graph_inputs import GraphInputs
from paged_attn.layer_difference import first_layer_that_differs
from paged_attn.passes.merge_linears import unmerged
from paged_attn.ragged_probe import first_disagreement, probe_prompts, relative_error, run_ragged, tolerance
from paged_attn.rows_apart import check_rows_apart

if TYPE_CHECKING:
    from paged_attn.compiled_graph import CompiledGraph

logger = logging.getLogger("paged_attn")
OWN_ERROR = 1e-5  # below that it is rounding
STEP_ERROR_GROWTH = 4  # of a layer's error on the way to the logits


def self_check(
    compiled: CompiledGraph, args: Sequence[Any], truth: Callable[[Tensor], Tensor] | None = None, model: nn.Module | None = None
) -> None:
    """Compare the two graphs of `compiled` on the parameters in `args`.

    Args:
        truth: logits [T, vocabulary] of a prompt [T]; by default the graph as it was traced, which is the model itself. Whoever gives
            it compares calls with other positions, too (`check_rows_apart`).
        model: for messages.

    Raises:
        UnsupportedError: logits differ, naming the first layer that does; or a later token moves an earlier logit.
    """
    started = time.perf_counter()
    inputs = GraphInputs(compiled.roles, args)
    with torch.no_grad():
        given, truth = truth is not None, truth or (lambda prompt: run_alone(compiled, inputs, prompt))
        prompts = probe_prompts(inputs.device_of(args), _num_ids(compiled, inputs, args, truth), compiled.max_positions)
        alone = [truth(prompt) for prompt in prompts]
        _check_rows(prompts, alone)
        _check_causality(compiled, truth, prompts, alone)
        if not given and "position_ids" in compiled.roles and all(spec.causal for spec in compiled.specs):
            check_rows_apart(lambda ids, at: run_alone(compiled, inputs, ids, at), prompts[1], compiled.max_positions, model)

        def run(batch: Batch) -> Tensor:
            assert compiled.eager_paged is not None
            return logits_of(compiled.eager_paged.forward(*inputs.fill(batch.input_ids, batch.positions, batch.logits_rows)))

        with _must_run("the rewritten graph", "a small ragged batch"):
            together = run_ragged(compiled.specs, prompts, inputs.dtype, run, compiled.recurrent or ())
    if (found := first_disagreement(alone, together, _own_error(compiled))) is not None:
        prompt = prompts[found.prompt]
        raise UnsupportedError(
            f"self-check failed: on a probe prompt of {len(prompt)} tokens the rewritten graph's logits are off by {found.error:.2g} of "
            f"their size (allowed {found.limit:g}). {first_layer_that_differs(compiled, inputs, prompt, found.limit)} This is a "
            "bug of paged_attn or a model whose tokens depend on more than their own prompt; please report it. Nothing was generated."
        )
    logger.info("self-check passed in %.2f s", time.perf_counter() - started)


def _own_error(compiled: CompiledGraph) -> float:
    """How far the model itself is off between many tokens at once and one by one: some recurrent layers have two formulas for it."""
    worst = max((layer.step_error for layer in compiled.recurrent or ()), default=0.0)
    return STEP_ERROR_GROWTH * worst if worst > OWN_ERROR else 0.0


def run_alone(compiled: CompiledGraph, inputs: GraphInputs, prompt: Tensor, positions: Tensor | None = None) -> Tensor:
    """Logits [T, vocabulary] of one prompt [T] through the graph as it was traced, by default at positions 0, 1, ..."""
    rows = torch.arange(len(prompt), device=prompt.device)
    assert compiled.original is not None, "for a graph from disk the model itself is the truth"
    with _must_run("the traced graph", f"{len(prompt)} tokens"):
        return logits_of(
            compiled.original.forward(
                *unmerged(inputs.fill(prompt, rows if positions is None else positions, rows), compiled.rewrite.merges)
            )
        )


@contextmanager
def _must_run(what: str, on: str) -> Iterator[None]:
    """A graph that breaks at another length than the traced one was specialised to that length."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        raise UnsupportedError(f"self-check failed: {what} can not run {on}: {error}. The model's code depends on the length.") from error


def logits_of(output: Any) -> Tensor:
    """[N, vocabulary] from a graph's flat outputs: the first floating tensor [1, N, ...]."""
    tensors = output if isinstance(output, (tuple, list)) else (output,)
    logits: Tensor = next(t for t in tensors if isinstance(t, Tensor) and t.is_floating_point() and t.dim() >= 2)
    return logits[0] if logits.dim() == 3 else logits


def _num_ids(compiled: CompiledGraph, inputs: GraphInputs, args: Sequence[Any], truth: Callable[[Tensor], Tensor]) -> int:
    """How many token ids the model has: the vocabulary of its logits if some table has as many rows, else the largest id of the call."""
    ids = next(a for a, role in zip(args, compiled.roles, strict=True) if role == "input_ids")
    vocabulary = truth(ids.flatten()[:2]).shape[-1]
    has_table = any(isinstance(t, Tensor) and t.dim() == 2 and t.shape[0] == vocabulary for t in inputs.owned)
    return vocabulary if has_table else int(ids.max()) + 1


def _check_rows(prompts: list[Tensor], alone: list[Tensor]) -> None:
    """A ragged batch needs the logits of any row; a call that keeps the last row alone would answer for one request only."""
    for prompt, logits in zip(prompts, alone, strict=True):
        if logits.shape[0] != len(prompt):
            raise UnsupportedError(
                f"this call gives logits of {logits.shape[0]} rows for {len(prompt)} tokens, but a ragged batch needs those of any row; "
                "leave logits_to_keep out, or pass logits_to_keep=batch.logits_rows"
            )


def _check_causality(compiled: CompiledGraph, truth: Callable[[Tensor], Tensor], prompts: list[Tensor], alone: list[Tensor]) -> None:
    if not all(spec.causal for spec in compiled.specs):
        return
    changed = prompts[1].clone()
    changed[-1] = prompts[1][:-1].max() if changed[-1] != prompts[1][:-1].max() else prompts[1][:-1].min()
    error = relative_error(alone[1][:-1], truth(changed)[:-1])
    if not error <= tolerance(alone[1].dtype):
        raise UnsupportedError(
            f"self-check failed: changing the last of {len(changed)} tokens moved earlier logits by {error:.2g} of their size, so the "
            "model is not causal outside its attention; it can not be generated from token by token."
        )
