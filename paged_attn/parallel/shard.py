"""Sharding a model that every rank has loaded whole, by the plan that transformers has for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paged_attn.attn_ops.errors import UnsupportedError


def shard(model: Any, device: torch.device | str | None = None) -> Any:
    """Keep of each weight what the model's `tp_plan` gives to this rank, over all ranks of the process group; returns the model.

    For a model that every rank holds whole (made from a config, or small); `from_pretrained(tp_plan="auto")` reads shards alone. Calls of
    the sharded model go through transformers' own hooks until an engine serves it. With one rank nothing is sharded.

    Args:
        model: a PreTrainedModel, the same on all ranks; it is changed.
        device: where the shards shall lie; default: where the model is.

    Raises:
        RuntimeError: no process group; run the script with torchrun and call torch.distributed.init_process_group.
        UnsupportedError: the model has no plan.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "shard needs a process group: start the script with `torchrun --nproc-per-node N` and call "
            "torch.distributed.init_process_group first"
        )
    target = torch.device(device) if device is not None else next(model.parameters()).device
    size = dist.get_world_size()
    if size > 1:
        if not getattr(model, "tp_plan", None):
            raise UnsupportedError(f"{type(model).__name__} has no tensor-parallel plan (model.tp_plan is empty); set one, or run it whole")
        _distribute(model, size, target)
    module: nn.Module = model
    nn.Module.to(module, target)
    return model


def _distribute(model: Any, size: int, target: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh = init_device_mesh(target.type, (size,), mesh_dim_names=("tp",))
    model.to(target)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is table.weight
    if tied:  # transformers cuts them one by one, and ties after that
        head.weight = nn.Parameter(table.weight.detach(), requires_grad=table.weight.requires_grad)
    expand = getattr(model, "_expand_parallel_plan", None)  # transformers 5.22; before, it reads the plan off the model
    apply_tensor_parallelism(model, mesh, *([] if expand is None else [expand(dict(model.tp_plan))]))
    model._device_mesh, model._tp_size = mesh, size
    if tied and _placement(head.weight) == _placement(table.weight):
        head.weight = table.weight
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            local = parameter._local_tensor
            if local.untyped_storage().nbytes() > local.nbytes:  # a view of the whole weight would keep that
                parameter._local_tensor = local.clone()


def _placement(weight: nn.Parameter) -> Any:
    return getattr(weight, "placements", None)
