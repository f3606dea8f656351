"""Devices as named in `Capabilities.devices`, and whether Triton is available."""

from __future__ import annotations

import importlib.util
import os
import platform
from functools import cache

import torch


def default_device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def checked_device(device: torch.device | str | None) -> torch.device:
    """The device; None: `default_device()`. Raises ValueError: it is not cpu or cuda, or not on this machine."""
    if device is None:
        return default_device()
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {str(device)!r} is not a device; allowed are cpu, cuda and cuda:N") from error
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r} is not supported; allowed are cpu, cuda and cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= count:
        raise ValueError(f"device {str(device)!r}: this machine shows {count} CUDA devices to PyTorch {torch.__version__}; take cpu")
    return found


def device_word(device: torch.device) -> str:
    """ "cuda"; "hip" for a GPU under ROCm; "cpu-amx" for a CPU with AMX; else the device's type."""
    if device.type == "cuda" and torch.version.hip is not None:
        return "hip"
    if device.type == "cpu" and torch.cpu._is_amx_tile_supported():
        return "cpu-amx"
    return device.type


def architecture_of(device: torch.device) -> int | None:
    """90 for SM90; None for devices other than CUDA's."""
    if device_word(device) != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def device_name(device: torch.device) -> str:
    """`NVIDIA H200`, or `CPU x86_64`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type.upper()} {platform.machine()}"


def memory_of(device: torch.device) -> int:
    """Total memory in bytes, of a GPU or else of this machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def devices_here() -> dict[str, list[int]]:
    """The words of all devices of this machine, with the architectures of CUDA devices."""
    found: dict[str, list[int]] = {device_word(torch.device("cpu")): []}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", index)
        architecture = architecture_of(device)
        found.setdefault(device_word(device), []).extend([] if architecture is None else [architecture])
    for kind in ("xpu", "npu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            found[kind] = []
    return found


@cache
def has_triton() -> bool:
    """Whether our own kernels can be compiled."""
    return importlib.util.find_spec("triton") is not None
