"""What transformers' tensor parallelism did to a model: its group of ranks, and the style of each module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from paged_attn.attn_ops.errors import UnsupportedError

ADVICE = "load it with transformers' tp_plan alone"


class Plan(NamedTuple):
    """The group of the ranks that hold the shards, and the style of each module that has one, by name."""

    group: dist.ProcessGroup
    styles: dict[str, str]


def plan_of(model: nn.Module) -> Plan | None:
    """How a model is sharded; None for one that is not.

    Raises:
        UnsupportedError: it is sharded in another way than by tensor parallelism on one mesh, or an attention head is cut in two.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    sharded = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    if not sharded:
        return None
    _refuse_other_sharding(model)
    meshes = {p.device_mesh for p in sharded.values()}
    mesh = meshes.pop()
    if meshes or mesh.ndim != 1:
        raise UnsupportedError(
            f"{type(model).__name__} is sharded over {len(meshes) + 1} meshes of up to {max(m.ndim for m in (mesh, *meshes))} dimensions; "
            f"known is tensor parallelism over one mesh of one dimension: {ADVICE}"
        )
    for name, parameter in sharded.items():
        if not isinstance(parameter.placements[0], (Shard, _StridedShard, Replicate)):
            raise UnsupportedError(f"{name} is placed as {parameter.placements}; known are whole and sharded parameters: {ADVICE}")
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    _refuse_cut_heads(model, mesh.size())
    return Plan(mesh.get_group(), dict(_styles(model, plan)))


def _styles(model: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name, _ in model.named_modules():
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if pattern in plan:
            yield name, plan[pattern]


def _refuse_other_sharding(model: nn.Module) -> None:
    settings: Any = getattr(getattr(model, "config", None), "distributed_config", None)
    for name in ("ep_size", "enable_expert_parallel", "fsdp_size", "pp_size", "dp_size"):
        value = settings.get(name) if isinstance(settings, dict) else getattr(settings, name, None)
        if value is True or (isinstance(value, int) and value > 1):
            raise UnsupportedError(
                f"{type(model).__name__} is loaded with {name}={value}; served are tensor-parallel models: {ADVICE}, and run copies of the "
                "engine for data parallelism"
            )


def _refuse_cut_heads(model: nn.Module, ranks: int) -> None:
    from torch.distributed.tensor import DTensor

    for name, module in model.named_modules():
        dim = getattr(module, "head_dim", None)
        for child in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(getattr(module, child, None), "weight", None)
            if not isinstance(dim, int) or not isinstance(weight, DTensor) or weight.placements[0].is_replicate():
                continue
            if (weight.shape[0] // dim) % ranks:
                raise UnsupportedError(
                    f"{name}.{child} has {weight.shape[0] // dim} heads of {dim}, which {ranks} ranks can not share without cutting one; "
                    "use as many ranks as divide the KV heads, or a tp_plan that leaves q_proj, k_proj, v_proj and o_proj whole"
                )
