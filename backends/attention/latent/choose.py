"""Which way a request's new tokens attend: to the rows themselves, or to keys and values that are made of them first.

Expanding costs a product for each token of the context; attending to rows costs wider dot products for each pair of tokens. So many new
tokens at once are better off with keys and values, and decode steps with the rows.
"""

from __future__ import annotations

from paged_attn.attn_ops.specs.latent import LatentSpec

# What an operation of attention over rows costs, next to one over keys and values, by kind of device (`python benchmarks/latent.py`).
# Above 1: wide heads run below the pace of narrow ones. "cuda" is not here: nothing was measured there, and operations are counted as they
# are.
PAIR_COST = {"cpu": 1.0}


def absorbed_operations(spec: LatentSpec, new: int, cached: int, pair_cost: float = 1.0) -> float:
    """Multiplications of one head for a request's new tokens, which attend to rows."""
    return new * spec.rank * (spec.key_dim + spec.value_dim) + _pairs(new, cached) * (spec.qk_head_dim + spec.rank) * pair_cost


def expanded_operations(spec: LatentSpec, new: int, cached: int) -> float:
    """The same, where keys and values are made of all its rows first."""
    return (new + cached) * spec.rank * (spec.key_dim + spec.value_dim) + _pairs(new, cached) * (
        spec.key_dim + spec.rotated + spec.value_dim
    )


def expands(spec: LatentSpec, new: int, cached: int, device: str) -> bool:
    """Whether the keys and values of a request are expanded for its new tokens; never in a decode step."""
    if new == 1:
        return False
    return expanded_operations(spec, new, cached) < absorbed_operations(spec, new, cached, PAIR_COST.get(device, 1.0))


def _pairs(new: int, cached: int) -> float:
    return new * cached + new * (new + 1) / 2
