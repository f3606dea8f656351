"""A rank's part of a module of experts: a slice of each (tensor parallelism), or some of them whole (expert parallelism)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from paged_attn.parallel.collectives import all_reduce


class OwnExperts:
    """A slice of every expert. The module's forward is `summed`.

    Attributes:
        forward: this rank's part of the sum over ranks. Replaced by another function while a model is traced.
        group: the name of the process group, for functional collectives.
    """

    def __init__(self, forward: Callable[..., Tensor], group: str) -> None:
        self.forward, self.group = forward, group

    def summed(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the whole module computes, on every rank."""
        return all_reduce(self.forward(*args, **kwargs), self.group)


class WholeExperts(OwnExperts):
    """`count` experts of `total`, starting with `first`. `forward` takes ids relative to `first`; ids from `count` on are other ranks'
    experts, which it skips."""

    def __init__(self, forward: Callable[..., Tensor], group: str, first: int, count: int, total: int) -> None:
        super().__init__(_without_others(forward, count), group)
        self.first, self.total = first, total

    def summed(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum over all ranks' experts [T, H], on every rank, from hidden states [T, H], ids and weights [T, k]."""
        ids = (top_k_index - self.first).remainder(self.total)
        return all_reduce(self.forward(hidden_states, ids, top_k_weights), self.group)


def own_experts(module: nn.Module) -> OwnExperts | None:
    """This rank's part of a module of experts, while the model is served as a rank's own modules; None for one that is whole."""
    owner = getattr(vars(module).get("forward"), "__self__", None)
    return owner if isinstance(owner, OwnExperts) else None


def _without_others(forward: Callable[..., Tensor], count: int) -> Callable[..., Tensor]:
    """transformers' forwards accept one id beyond the experts; some compute an expert for it and rely on its weight being 0."""
    return lambda x, ids, weights: forward(x, ids.clamp(max=count), weights.masked_fill(ids >= count, 0.0))
