"""Finds the part that causes a wrong row: a kernel, the recognition of a layer, Inductor, a pass, or the model's own code."""

from __future__ import annotations

from dataclasses import replace

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.check.compare.noise import Noise
from paged_attn.check.compare.ragged import compare_ragged, compare_rows_of_original
from paged_attn.check.compare.suspects import Suspect
from paged_attn.check.runs.served import Original, Served
from paged_attn.check.runs.steps import steps_of
from paged_attn.check.runs.truth import Truth
from paged_attn.passes.report import LayerReport

EXACT_BACKEND = "reference"


def refusal(suspect: Suspect, served: Served, original: Original, truth: Truth, noise: Noise) -> UnsupportedError:
    """The error for the first wrong row."""
    seen = (
        f"token {suspect.row + 1} of a prompt of {len(truth.prompts[suspect.prompt])}, among {suspect.step}, is off by "
        f"{suspect.error:.2g} of its size (allowed {suspect.limit:.2g}; rounding alone does {noise.level[suspect.name]:.2g})"
    )
    layer = None if suspect.boundary is None else suspect.boundary.layer
    if served.settings.ranks is not None:  # finding out more would need the other ranks
        where = original.module_of(suspect.name) if layer is None else f"the attention of layer {layer.layer_id}"
        return UnsupportedError(
            f"self-check failed on rank {served.settings.ranks.rank} of {served.settings.ranks.size}: what is served computes something "
            f"else in {where} than the model: {seen}. Try the whole model on one device: its message says which part is at fault. "
            "Nothing was generated."
        )
    if layer is not None:
        return _of_attention(suspect, layer, served, truth, noise, seen)
    where = original.module_of(suspect.name)
    uncompiled = served.variant(served.settings, compiled=False)
    if uncompiled is not None and _agrees(suspect, uncompiled, truth, noise):
        return UnsupportedError(
            f"self-check failed: what Inductor compiled for {where} computes something else than the model: {seen}. The same pieces "
            "uncompiled agree with the model: inductor=False serves it. Please report this."
        )
    step = next(step for step in steps_of(truth.prompts, served.is_causal, truth.others) if step.name == suspect.step)
    if any(other.name == suspect.name for other in compare_rows_of_original(original, step, truth, noise)):
        return UnsupportedError(
            f"self-check failed: {where} computes other numbers for a token if the batch has other requests: {seen}. In a batch "
            "every row must depend only on its own token and position; known to break that are forward hooks and modules that look at "
            "other rows, at a row's index or at the number of tokens. Nothing was generated."
        )
    return UnsupportedError(
        f"self-check failed: what is served computes something else in {where} than the model: {seen}. {served.more_than_attention}. "
        "Please report this. Nothing was generated."
    )


def _of_attention(suspect: Suspect, layer: LayerReport, served: Served, truth: Truth, noise: Noise, seen: str) -> UnsupportedError:
    spec = layer.spec
    words = f"the attention of layer {layer.layer_id} ({spec.module or 'module unknown'}: {spec.describe()})"
    if spec.by_backend and served.settings.backend != EXACT_BACKEND:
        exact = served.variant(replace(served.settings, backend=EXACT_BACKEND, deterministic=False))
        if exact is not None and _agrees(suspect, exact, truth, noise):
            return UnsupportedError(
                f"self-check failed: the attention backend computes {words} wrongly: {seen}. The {EXACT_BACKEND} backend agrees with the "
                "model: name another one, such as backend='torch_native'. Please report this."
            )
    return UnsupportedError(
        f"self-check failed: {words} was recognised wrongly: {seen}, with any backend. {served.otherwise}. "
        "Please report this. Nothing was generated."
    )


def _agrees(suspect: Suspect, served: Served, truth: Truth, noise: Noise) -> bool:
    return all(other.name != suspect.name for other in compare_ragged(served, truth, noise))
