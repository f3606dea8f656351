"""Compares the rewritten graph on ragged batches with the original, row by row and at each boundary separately."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attn.check.compare.noise import Noise
from paged_attn.check.compare.suspects import Suspect, suspects_in
from paged_attn.check.runs.boundaries import Boundary
from paged_attn.check.runs.served import HowToRun, Original, Served, must_run
from paged_attn.check.runs.steps import Step, Steps, steps_of
from paged_attn.check.runs.truth import LOGITS, Truth
from paged_attn.tolerances import row_errors

RAISED = "The attention backend raised it, or the model's code depends on the length: the traceback of this error's cause has the line."


def compare_ragged(served: Served, truth: Truth, noise: Noise) -> list[Suspect]:
    """Runs the steps of the probe prompts; each value between two pieces is compared, then replaced by the truth. Raises UnsupportedError:
    the rewritten graph cannot run such a batch, or no backend can."""
    steps = Steps(served.specs, truth.prompts, served.kv_dtype, served.recurrent, served.settings, truth.others)
    found: list[Suspect] = []
    for step in steps_of(truth.prompts, served.is_causal, truth.others):
        rows = RowsOfStep(step, truth, noise)
        with steps.context(step) as context, must_run("the rewritten graph", f"a ragged batch ({step.name})", RAISED):
            logits = served.run(context.batch, rows.visit)
        rows.compare(LOGITS, logits[: len(rows.at)], None)
        found += rows.suspects
    return found


def compare_rows_of_original(original: Original, step: Step, truth: Truth, noise: Noise) -> list[Suspect]:
    """Runs the original on the rows of a step, concatenated as if they were one prompt, with everything that mixes tokens replaced by the
    truth: any error here is the model's own, caused by a row's place in the batch."""
    rows = RowsOfStep(step, truth, noise)
    prompts = truth.prompts + truth.others  # as `Part.prompt` counts them
    ids = torch.cat([prompts[part.prompt][part.start : part.end] for part in step.parts])
    positions = torch.cat([torch.arange(part.start, part.end, device=ids.device) for part in step.parts])
    original.run(ids, rows.visit_original, HowToRun(positions=positions))
    return rows.suspects


class RowsOfStep:
    """Compares the prompts' rows in one step with the truth, and replaces them by it. Rows of other requests stay."""

    def __init__(self, step: Step, truth: Truth, noise: Noise) -> None:
        self.step, self.truth, self.noise = step, truth, noise
        rows = [(part.prompt, row) for part in step.parts for row in range(part.start, part.end)]
        at = [i for i, (prompt, _) in enumerate(rows) if prompt < len(truth.prompts)]
        self.parts = [part for part in step.parts if part.prompt < len(truth.prompts)]
        self.identities = [rows[i] for i in at]
        self.num_rows, self.at = len(rows), torch.tensor(at, device=truth.prompts[0].device)
        self.suspects: list[Suspect] = []

    def visit(self, boundary: Boundary, value: Tensor) -> Tensor:
        """Compares a served value: an operand or the output of an attention [T, heads, dim], or a value laid out as in the original."""
        name = boundary.original
        if name not in self.truth.names:
            return value
        copied = value.clone()
        rows = copied if boundary.is_of_op else self.truth.rows_of(name, copied)
        # All rows, if those whose logits are not wanted were already dropped.
        at = self.at if len(rows) >= self.num_rows else torch.arange(len(self.at), device=rows.device)
        rows[at] = self.compare(name, rows[at], boundary).to(value.dtype)
        return copied

    def visit_original(self, name: str, value: Tensor) -> Tensor:
        """Compares a value of the original graph."""
        if name not in self.truth.names:
            return value
        self.compare(name, self.truth.written_of(name, value)[self.at], None)
        rows = [self.truth.rows(part.prompt, name)[part.start : part.end] for part in self.parts]
        return self.truth.with_rows(name, value, torch.cat(rows), self.at)

    def compare(self, name: str, rows: Tensor, boundary: Boundary | None) -> Tensor:
        """The truth for the prompts' rows [N, ...], in the same shape."""
        expected = torch.cat([self.truth.served(part.prompt, name, boundary)[part.start : part.end] for part in self.parts])
        got = rows.reshape(expected.shape)
        usual = None if boundary is not None and boundary.operand is not None else self.truth.usual[name]
        errors = row_errors(expected, got, usual)
        limits = torch.cat([self.noise.limits(name, part.prompt, part.start, part.end) for part in self.parts])
        self.suspects += suspects_in(name, errors, limits, self.identities, got, self.step.name, boundary)
        return expected.reshape(rows.shape)
