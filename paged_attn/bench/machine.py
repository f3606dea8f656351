"""The memory use of a process and a device, and a description of the machine."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from typing import Any

MIB = 2**20


def host_peak_bytes() -> int:
    """The most resident memory that this process had; other processes, such as vLLM's engine, are not in it."""
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib if platform.system() == "Darwin" else kib * 1024


def device_used_bytes(device: str) -> int | None:
    """Memory in use on a GPU, by all processes: a peer's engine may be a process of its own. None off CUDA, or if nvidia-smi
    is missing or does not answer: the column then says so."""
    if not device.startswith("cuda") or shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True)
    if answer.returncode != 0:
        return None
    rows = [line.split(", ") for line in answer.stdout.splitlines()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [row[0] for row in rows] if visible is None else visible.split(",")
    wanted = names[int(device.partition(":")[2] or 0)].strip()
    used = [row[2] for row in rows if row[0] == wanted or row[1].startswith(wanted)]
    return int(used[0]) * MIB if used else None


def machine(device: str) -> dict[str, Any]:
    """For readers of the figures."""
    import torch

    from paged_attn.backends.devices import device_name

    return {
        "device": device_name(torch.device(device)),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
