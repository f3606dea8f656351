"""Shards a model that every rank has loaded whole, by transformers' plans for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.parallel.plan import EXPERT_PARALLEL, merged_rules, pattern_of


def shard(model: Any, device: torch.device | str | None = None, expert_parallel: bool = False) -> Any:
    """Keep only this rank's part of each weight, by the model's plans over all ranks of the process group; returns the model.

    For a model that every rank holds whole (made from a config, or small); `from_pretrained(distributed_config=...)` reads only shards.
    Calls of the sharded model go through transformers' own hooks until an engine serves it. With one rank nothing is sharded.

    Args:
        model: a PreTrainedModel, the same on all ranks; it is changed.
        device: for the shards; default: the model's.
        expert_parallel: each rank has some whole experts, by the model's `ep_plan`, and everything else is sharded by its `tp_plan` (set
            `model.tp_plan = {}` to leave that whole). Otherwise experts are sliced like everything else.

    Raises:
        RuntimeError: no process group; run the script with torchrun and call torch.distributed.init_process_group.
        UnsupportedError: the model has no such plan, or its experts cannot be shared out evenly.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "shard needs a process group: start the script with `torchrun --nproc-per-node N` and call "
            "torch.distributed.init_process_group first"
        )
    target = torch.device(device) if device is not None else next(model.parameters()).device
    size = dist.get_world_size()
    if size > 1:
        if expert_parallel:
            _refuse_uneven_experts(model, size)
        elif not getattr(model, "tp_plan", None):
            raise UnsupportedError(f"{type(model).__name__} has no tensor-parallel plan (model.tp_plan is empty); set one, or run it whole")
        _distribute(model, size, target, expert_parallel)
    module: nn.Module = model
    nn.Module.to(module, target)
    return model


def distributed_config(ranks: int, expert_parallel: bool) -> Any:
    """transformers' DistributedConfig for a model's plans over all ranks: `tp_plan`, and with `expert_parallel` also `ep_plan`.

    Up to transformers 5.19 `ep_plan` then replaces `tp_plan`, and modules that it does not name are whole on all ranks.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    if not expert_parallel:
        return DistributedConfig(tp_plan="auto")
    if "ep_size" in DistributedConfig.__dataclass_fields__:
        return DistributedConfig(tp_size=ranks, ep_size=ranks)
    return DistributedConfig(tp_size=ranks, enable_expert_parallel=True)


def _refuse_uneven_experts(model: Any, size: int) -> None:
    plan = getattr(model, "_ep_plan", None)
    if not plan:
        raise UnsupportedError(
            f"{type(model).__name__} has no expert-parallel plan (model.ep_plan is empty); leave expert_parallel out, and each rank "
            "has a slice of every expert"
        )
    for name, parameter in model.named_parameters():
        if plan.get(pattern_of(name)) == "grouped_gemm" and len(parameter) % size:
            raise UnsupportedError(
                f"{name} holds {len(parameter)} experts, which {size} ranks cannot share evenly; use a number of ranks that divides "
                "them, or leave expert_parallel out, and each rank has a slice of every expert"
            )


def _distribute(model: Any, size: int, target: torch.device, expert_parallel: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh(target.type, (size,), mesh_dim_names=("tp",))
    model.to(target)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is table.weight
    if tied:  # transformers shards them separately, and ties them afterwards
        head.weight = nn.Parameter(table.weight.detach(), requires_grad=table.weight.requires_grad)
    _apply_plans(model, mesh, expert_parallel)
    model._device_mesh, model._tp_size = mesh, size
    if tied and getattr(head.weight, "placements", None) == getattr(table.weight, "placements", None):
        head.weight = table.weight
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            local = parameter._local_tensor
            if local.untyped_storage().nbytes() > local.nbytes:  # a view of the whole weight would keep that
                parameter._local_tensor = local.clone()


def _apply_plans(model: Any, mesh: Any, expert_parallel: bool) -> None:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    expand = getattr(model, "_expand_parallel_plan", None)  # transformers 5.22; before, it reads the one plan off the model
    rules = merged_rules(model.tp_plan or {}, model._ep_plan if expert_parallel else {})
    if expert_parallel:
        if expand is None and EXPERT_PARALLEL in rules.values():
            raise UnsupportedError("expert parallelism is known for transformers 5.17 and from 5.22 on; pip install 'transformers>=5.22'")
        model.config.distributed_config = distributed_config(mesh.size(), True)
        if expand is None:
            model._ep_plan = rules
    dense = {name: style for name, style in rules.items() if not expert_parallel or name not in model._ep_plan}
    apply_tensor_parallelism(model, mesh, *([] if expand is None else [expand(dense)]))
    if expert_parallel and expand is not None:
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        apply_expert_parallelism(model, mesh, mesh, expand(dict(model._ep_plan)))
