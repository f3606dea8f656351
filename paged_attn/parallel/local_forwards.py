"""The forward for each style of transformers' tensor parallelism, on a rank's own tensors, with traceable collectives."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.parallel.collectives import all_gather_last_dim, all_reduce, broadcast_from_first
from paged_attn.parallel.own_experts import OwnExperts, WholeExperts
from paged_attn.parallel.plan import EXPERT_PARALLEL
from paged_attn.parallel.ranks import Ranks

Forward = Callable[..., Any]
# For ep_router (up to transformers 5.22) ids are passed on unchanged: `WholeExperts` takes the ids of all ranks.
AS_IT_IS = {"colwise", "packed_colwise", "replicated_with_grad_allreduce", "replicate", "local_params", "mla_kv_a_proj", "ep_router"}


def local_forward(name: str, module: nn.Module, style: str, ranks: Ranks, cut: bool) -> Forward:
    """The forward of a module with a rank's own parameters.

    Args:
        style: the module's style in `Plan.styles`.
        cut: whether any of the module's parameters is a shard.

    Raises:
        UnsupportedError: the style is not known, or not for such a module.
    """
    whole = types.MethodType(type(module).forward, module)
    if style in AS_IT_IS and not (cut and isinstance(module, nn.Embedding)):
        return _as_it_is(whole)
    if style in ("colwise_gather_output", "colwise_rep") and isinstance(module, nn.Linear):
        return _gathered(whole, module.out_features, ranks)
    if style in ("rowwise", "rowwise_split_input", "rowwise_rep") and isinstance(module, nn.Linear):
        return _summed_linear(module, ranks, slices_input=style != "rowwise")
    if style in ("embedding_rowwise", "embedding_colwise") and isinstance(module, nn.Embedding) and module.max_norm is None:
        if style == "embedding_colwise" or module.weight.shape[1] < module.embedding_dim:
            return _gathered(whole, module.embedding_dim, ranks)
        return _summed_embedding(whole, module, ranks)
    if style == "moe_tp_experts":
        return OwnExperts(whole, ranks.name).summed if cut else _as_it_is(whole)
    if style == EXPERT_PARALLEL and cut and isinstance(count := getattr(module, "num_experts", None), int):
        return WholeExperts(whole, ranks.name, ranks.rank * count, count, ranks.size * count).summed
    if style == "all_reduce":
        group = ranks.name
        return lambda *args, **kwargs: all_reduce(whole(*args, **kwargs), group)
    if style == "moe_identity_expert":
        return lambda x, *args, **kwargs: whole(x / ranks.size, *args, **kwargs)
    raise UnsupportedError(
        f"{name} ({type(module).__name__}) has the parallel style {style!r}, which is not known for such a module; give "
        "from_pretrained a plan without it"
    )


def equal_on_all_ranks(forward: Forward, ranks: Ranks) -> Forward:
    """`forward` with the first rank's result on all ranks."""
    group = ranks.name
    return lambda *args, **kwargs: broadcast_from_first(forward(*args, **kwargs), group)


def _as_it_is(whole: Forward) -> Forward:
    """Wrap a forward in a function of this file, so that the graph cache recognizes it as ours."""
    return lambda *args, **kwargs: whole(*args, **kwargs)


def _gathered(whole: Forward, width: int, ranks: Ranks) -> Forward:
    size, group = ranks.size, ranks.name
    return lambda *args, **kwargs: all_gather_last_dim(whole(*args, **kwargs), width, size, group)


def _summed_linear(module: nn.Linear, ranks: Ranks, slices_input: bool) -> Forward:
    group = ranks.name
    start = ranks.rank * -(-module.in_features // ranks.size)

    def forward(x: Tensor) -> Tensor:
        if slices_input:
            x = x.narrow(-1, start, module.weight.shape[1])
        output = all_reduce(functional.linear(x, module.weight), group)
        return output if module.bias is None else output + module.bias

    return forward


def _summed_embedding(whole: Forward, module: nn.Embedding, ranks: Ranks) -> Forward:
    """Each rank looks up the ids of its own rows; the others add zeros."""
    group, rows = ranks.name, module.weight.shape[0]
    start = ranks.rank * -(-module.num_embeddings // ranks.size)

    def forward(ids: Tensor) -> Tensor:
        mine = (ids >= start) & (ids < start + rows)
        return all_reduce(whole((ids - start).where(mine, 0)).where(mine[..., None], 0), group)

    return forward
