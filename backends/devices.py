"""Devices in the words of `Capabilities.devices`, and whether Triton is here."""

from __future__ import annotations

import importlib.util
import platform
from functools import cache

import torch


def default_device() -> torch.device:
    """The GPU, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_word(device: torch.device) -> str:
    """ "cuda"; "hip" for the same under ROCm; "cpu-amx" for a CPU with AMX; else the device's type."""
    if device.type == "cuda" and torch.version.hip is not None:
        return "hip"
    if device.type == "cpu" and torch.cpu._is_amx_tile_supported():
        return "cpu-amx"
    return device.type


def architecture_of(device: torch.device) -> int | None:
    """90 for SM90, None off CUDA."""
    if device_word(device) != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def device_name(device: torch.device) -> str:
    """`NVIDIA H200`, or `CPU x86_64`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type.upper()} {platform.machine()}"


def devices_here() -> dict[str, list[int]]:
    """The words of all devices of this machine; of CUDA devices with their architectures."""
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
    """Whether kernels of our own can be compiled."""
    return importlib.util.find_spec("triton") is not None
