"""Which way a request's new tokens attend: to the rows themselves, or to keys and values that are made of them first.

Expanding costs a product for each token of the context; attending to rows costs wider dot products for each pair of tokens. So many new
tokens at once are better off with keys and values, and decode steps with the rows.
"""

from __future__ import annotations

from paged_attn.attn_ops.specs.latent import LatentSpec


def absorbed_operations(spec: LatentSpec, new: int, cached: int) -> float:
    """Multiplications of one head for a request's new tokens, which attend to rows."""
    return new * spec.rank * (spec.key_dim + spec.value_dim) + _pairs(new, cached) * (spec.qk_head_dim + spec.rank)


def expanded_operations(spec: LatentSpec, new: int, cached: int) -> float:
    """The same, where keys and values are made of all its rows first."""
    return (new + cached) * spec.rank * (spec.key_dim + spec.value_dim) + _pairs(new, cached) * (
        spec.key_dim + spec.rotated + spec.value_dim
    )


def expands(spec: LatentSpec, new: int, cached: int) -> bool:
    """Whether the keys and values of a request are expanded for its new tokens; never in a decode step.

    An operation counts as much either way: `python benchmarks/latent.py` finds a factor of 1 on a CPU, and none that fits on a GPU.
    """
    return new > 1 and expanded_operations(spec, new, cached) < absorbed_operations(spec, new, cached)


def _pairs(new: int, cached: int) -> float:
    return new * cached + new * (new + 1) / 2
