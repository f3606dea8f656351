"""Tokens that are sorted by expert move with the experts, if each goes through those that it chose, and through nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 - defines the op
from torch import Tensor

from tests.passes.optimize.test_logits_gather import Use, moved

grouped_mm = torch.ops.transformers.grouped_mm_fallback
K, EXPERTS = 2, 4


def counted(keys: Tensor, bins: int = EXPERTS) -> Tensor:
    return torch.cumsum(torch.histc(keys.float(), bins=bins, min=0, max=bins - 1), 0, dtype=torch.int32)


def inverse_of(places: Tensor) -> Tensor:
    back = torch.empty_like(places)
    back[places] = torch.arange(places.size(0))
    return back


def experts(
    x: Tensor,
    m: Any,
    ids_of: Callable[[Tensor], Tensor] = lambda ids: ids,
    sort: Callable[[Tensor], Any] = torch.sort,
    rows_of: Callable[[Tensor], Tensor] = lambda places: places // K,
    offsets: Callable[[Tensor], Tensor] = counted,
    change: Callable[[Tensor, Tensor], Tensor] = lambda y, keys: y,
    inverse: Callable[[Tensor], Tensor] = inverse_of,
) -> Tensor:
    """x [1, T, 32] through two of four experts each."""
    weights, ids = torch.topk(m.router(x[0]), K, -1)
    keys, places = sort(ids_of(ids).reshape(-1))
    inner = grouped_mm(x[0][rows_of(places)], m.w, offs=offsets(keys)).relu()
    y = grouped_mm(change(inner, keys), m.v, offs=offsets(keys)) * weights.reshape(-1)[places].unsqueeze(-1)
    return x + y[inverse(places)].view(-1, K, 32).sum(1)


APART: dict[str, Use] = {
    "as it is": lambda x, m, p: experts(x, m),
    "with a bias per expert": lambda x, m, p: experts(x, m, change=lambda y, keys: y + m.table[keys]),
    "biased in place": lambda x, m, p: experts(x, m, change=lambda y, keys: y.add_(m.table[keys])),
    "in another order of ties": lambda x, m, p: experts(x, m, sort=lambda ids: torch.sort(ids, stable=True)),
    "behind another layer": lambda x, m, p: experts(m.norm(m.a(x)), m),
}
MIXING: dict[str, Use] = {
    "sorted downwards": lambda x, m, p: experts(x, m, sort=lambda ids: torch.sort(ids, descending=True)),
    "counted in other groups": lambda x, m, p: experts(x, m, offsets=lambda keys: counted(keys, EXPERTS + 1)[1:]),
    "counted up to another number": lambda x, m, p: experts(
        x, m, offsets=lambda k: torch.cumsum(torch.histc(k.float(), bins=EXPERTS, min=0, max=EXPERTS), 0, dtype=torch.int32)
    ),
    "the counts of something else": lambda x, m, p: experts(x, m, offsets=lambda keys: counted(keys.flip(0))),
    "experts that nobody chose": lambda x, m, p: experts(x, m, ids_of=lambda ids: ids - 1),
    "experts that are changed in place": lambda x, m, p: experts(x, m, ids_of=lambda ids: ids.clamp_(min=1)),
    "sorted ones that are changed in place": lambda x, m, p: experts(x, m, offsets=lambda keys: counted(keys.clamp_(min=1))),
    "rows of other tokens": lambda x, m, p: experts(x, m, rows_of=lambda places: places // 3),
    "a sum over the sorted": lambda x, m, p: experts(x, m, change=lambda y, keys: y.cumsum(0)),
    "put back elsewhere": lambda x, m, p: experts(x, m, inverse=lambda places: places),
    "put back from behind": lambda x, m, p: experts(x, m, inverse=lambda places: inverse_of(places).flip(0)),
    "half of them put back": lambda x, m, p: experts(x, m, inverse=lambda places: inverse_of(places) // 2),
}


@pytest.mark.parametrize("name", APART)
def test_experts_that_each_row_chose_move(name: str) -> None:
    names = moved(APART[name])
    assert names.count("grouped_mm_fallback") == 2 and "linear" in names and names[-1] == "add"


@pytest.mark.parametrize("name", MIXING)
def test_any_other_dispatch_stays(name: str) -> None:
    names = moved(MIXING[name])
    assert "grouped_mm_fallback" not in names and "linear" not in names


def test_every_expert_for_every_row_moves() -> None:
    """Llama 4 repeats the tokens for each expert; others take each row's own matrix."""

    def all_of_them(x: Tensor, m: Any, p: Tensor) -> Tensor:
        repeated = x[0].repeat(EXPERTS, 1) * torch.sigmoid(m.router(x[0])).transpose(0, 1).reshape(-1, 1)
        return x + torch.bmm(torch.bmm(repeated.view(EXPERTS, -1, 32), m.w), m.v).reshape(EXPERTS, -1, 32).sum(0)

    def own_matrix(x: Tensor, m: Any, p: Tensor) -> Tensor:
        ids = torch.topk(m.router(x[0]), K, -1)[1].reshape(-1)
        inner = torch.bmm(x[0].repeat_interleave(K, 0).unsqueeze(1), m.w[ids])
        return x + torch.bmm(inner, m.v[ids]).view(-1, K, 32).sum(1)

    assert moved(all_of_them).count("bmm") == 2
    assert moved(own_matrix).count("bmm") == 2
