"""Processes started by torchrun: how many there are, which one this is, and how they form a process group."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def num_processes() -> int:
    """As torchrun's WORLD_SIZE says; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this is the process of rank 0, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def join(device: torch.device) -> torch.device:
    """Make the group of all processes; returns this one's device: of `cuda` the GPU of its own. `leave` ends the group. Raises ValueError:
    one GPU named for all processes, or more processes on this machine than GPUs."""
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        if device.index is not None:
            raise ValueError(f"--device {device} is one GPU for {num_processes()} processes; give --device cuda, and each takes its own")
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"process {local} of this machine finds {torch.cuda.device_count()} GPUs; give torchrun an --nproc-per-node of that many"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device


def leave() -> None:
    """End the group, if there is one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
