"""What the GPU and its Triton support, for launching our kernels."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
import triton

logger = logging.getLogger("paged_attn")
GLUON_VERSIONS = ("3.6", "3.7")  # Triton versions for which the Hopper kernels compile: Gluon is experimental and changes


@dataclass(frozen=True)
class Machine:
    """What launches depend on.

    Attributes:
        multiprocessors: of the GPU.
        hopper: whether the kernels for Hopper run there: compute capability 9.0 and a Triton that they are written for.
        early: whether kernels may be launched before the one in front has ended: compute capability 9.0 or more; measured on 9.0 only.
        l2_bytes: of its L2 cache; 0: not known.
        shared_bytes: of shared memory that a program may have, which is what blocks have to fit: 227 KiB on Hopper, 163 on an A100, 99 on
            GPUs for games; 0: not known.
        sm90_or_newer: compute capability 9.0 or more, whatever Triton is there and however kernels are launched.
        blackwell: compute capability 10.x, where Triton has sums of products of 64 rows or more in tensor memory.
    """

    multiprocessors: int
    hopper: bool
    early: bool
    l2_bytes: int = 0
    shared_bytes: int = 0
    sm90_or_newer: bool = False
    blackwell: bool = False


@cache
def machine_of(device: torch.device) -> Machine:
    """In Triton's interpreter, on the CPU, there are as many multiprocessors as make small tests cut their items."""
    if device.type != "cuda":
        return Machine(3, hopper=False, early=False)
    capability = (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)  # ROCm's are numbers of another kind
    hopper = capability == (9, 0)
    if hopper and not (known := triton.__version__.startswith(GLUON_VERSIONS)):
        logger.warning(
            "Triton %s: the prefill kernel for Hopper compiles with %s; the general one runs instead, at about 0.65 of its pace",
            triton.__version__, " and ".join(GLUON_VERSIONS),
        )  # fmt: skip
        hopper = known
    sm90_or_newer = capability >= (9, 0)
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 0)  # torch does not have it for every GPU
    return Machine(
        properties.multi_processor_count, hopper, early=sm90_or_newer, l2_bytes=properties.L2_cache_size, shared_bytes=shared_bytes,
        sm90_or_newer=sm90_or_newer, blackwell=capability[0] == 10,
    )  # fmt: skip


def early_start(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """EARLY of a kernel that may be launched before the one in front has ended, with Triton's option for it, which not every GPU's
    compiler knows."""
    return {"EARLY": True, "launch_pdl": True} if wanted and machine_of(device).early else {"EARLY": False}


def power_of_2(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
