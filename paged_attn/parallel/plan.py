"""What transformers' tensor and expert parallelism did to a model: its group of ranks, and the style of each module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from paged_attn.attn_ops.errors import UnsupportedError

ADVICE = "load it with transformers' tp_plan, and its ep_plan if experts stay whole, over all ranks"
EXPERT_PARALLEL = "ep_dispatch_experts"
SENDING_KERNEL = "deepgemm_megamoe"
SUMMING = ("auto", "all_reduce")  # ways to bring tokens to experts: every rank has all tokens, and the ranks' results are added up


class Plan(NamedTuple):
    """The group of the ranks that hold the shards, and the style of each module that has one, by name.

    Experts that are whole have the style EXPERT_PARALLEL, by whichever name transformers calls it.
    """

    group: dist.ProcessGroup
    styles: dict[str, str]


def plan_of(model: nn.Module) -> Plan | None:
    """How a model is sharded; None for one that is not. Raises UnsupportedError: it is sharded in another way than by tensor and expert
    parallelism over the same ranks, or an attention head is cut in two."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    sharded = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    if not sharded:
        return None
    _refuse_other_sharding(model)
    meshes = list(dict.fromkeys(p.device_mesh for p in sharded.values()))  # in the same order on all ranks
    mesh = meshes[0]
    if any(each.ndim != 1 or not torch.equal(each.mesh, mesh.mesh) for each in meshes):
        raise UnsupportedError(
            f"{type(model).__name__} is sharded over {len(meshes)} meshes of up to {max(each.ndim for each in meshes)} dimensions; known "
            f"are tensor and expert parallelism over the same ranks: {ADVICE}"
        )
    for name, parameter in sharded.items():
        if not isinstance(parameter.placements[0], (Shard, _StridedShard, Replicate)):
            raise UnsupportedError(f"{name} is placed as {parameter.placements}; known are whole and sharded parameters: {ADVICE}")
    _refuse_cut_heads(model, mesh.size())
    return Plan(mesh.get_group(), dict(_styles(model, _rules_of(model))))


def merged_rules(tp_plan: dict[str, str], ep_plan: dict[str, str]) -> dict[str, str]:
    """Both plans as one. As in transformers, what an expert-parallel rule names, with all below it, has no tensor-parallel rule."""
    named = tuple(f"{name}." for name in ep_plan)
    return {name: style for name, style in tp_plan.items() if not f"{name}.".startswith(named)} | ep_plan


def pattern_of(name: str) -> str:
    """The pattern of a module or parameter, as plans write it: `layers.*` for all layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _rules_of(model: Any) -> dict[str, str]:
    tp_plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    if not (_setting(model, "enable_expert_parallel") or _setting(model, "ep_size", 1) > 1):
        return tp_plan
    ep_plan: dict[str, str] = model._ep_plan
    way = _setting(model, "ep_implementation", "auto")
    if getattr(model.config, "_experts_implementation", None) == SENDING_KERNEL:
        way = SENDING_KERNEL
    if EXPERT_PARALLEL in ep_plan.values() and way not in SUMMING:
        raise UnsupportedError(
            f"{type(model).__name__} is loaded with ep_implementation={way!r}; served are {' and '.join(map(repr, SUMMING))}: all "
            "ranks have all tokens, so that none needs to be sent"
        )
    return merged_rules(tp_plan, ep_plan)


def _styles(model: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        pattern = pattern_of(name)
        if pattern not in plan:
            continue
        whole = any(plan.get(f"{pattern}.{own}") == "grouped_gemm" for own, _ in module.named_parameters(recurse=False))
        yield name, EXPERT_PARALLEL if whole and plan[pattern] == "moe_tp_experts" else plan[pattern]  # so called up to 5.19


def _setting(model: Any, name: str, default: Any = None) -> Any:
    """A setting of the DistributedConfig that the model was loaded with."""
    settings: Any = getattr(getattr(model, "config", None), "distributed_config", None)
    value = settings.get(name) if isinstance(settings, dict) else getattr(settings, name, None)
    return default if value is None else value


def _refuse_other_sharding(model: nn.Module) -> None:
    for name in ("fsdp_size", "pp_size", "dp_size"):
        if _setting(model, name, 1) > 1:
            raise UnsupportedError(
                f"{type(model).__name__} is loaded with {name}={_setting(model, name)}; served are tensor- and expert-parallel models: "
                f"{ADVICE}, and run copies of the engine for data parallelism"
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
                    f"{name}.{child} has {weight.shape[0] // dim} heads of {dim}, which {ranks} ranks cannot share without cutting one; "
                    "use as many ranks as divide the KV heads, or a tp_plan that leaves q_proj, k_proj, v_proj and o_proj whole"
                )
