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
    """The properties of a GPU that launches depend on.

    Attributes:
        multiprocessors: their number.
        hopper: whether the kernels for Hopper run: compute capability 9.0, and a Triton version that they are written for.
        early: whether kernels may be launched before their predecessor has ended: compute capability 9.0 or more, measured only on 9.0.
        l2_bytes: size of the L2 cache; 0: unknown.
        shared_bytes: shared memory per program, a limit for blocks: 227 KiB on Hopper, 163 on an A100, 99 on gaming GPUs; 0: not known.
        sm90_or_newer: compute capability 9.0 or more, whatever the Triton version.
        blackwell: compute capability 10.x, where Triton accumulates products of 64 rows or more in tensor memory.
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
    """The machine of a device. On the CPU (Triton's interpreter), few multiprocessors, so that small tests split their work."""
    if device.type != "cuda":
        return Machine(3, hopper=False, early=False)
    capability = (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)  # ROCm's numbers mean something else
    hopper = capability == (9, 0)
    if hopper and not (known := triton.__version__.startswith(GLUON_VERSIONS)):
        logger.warning(
            "Triton %s: the prefill kernel for Hopper compiles with %s; the general one runs instead, at about 0.65 of its pace",
            triton.__version__, " and ".join(GLUON_VERSIONS),
        )  # fmt: skip
        hopper = known
    sm90_or_newer = capability >= (9, 0)
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 0)  # missing in torch for some GPUs
    return Machine(
        properties.multi_processor_count, hopper, early=sm90_or_newer, l2_bytes=properties.L2_cache_size, shared_bytes=shared_bytes,
        sm90_or_newer=sm90_or_newer, blackwell=capability[0] == 10,
    )  # fmt: skip


def early_start(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """EARLY for a kernel that may be launched before its predecessor has ended, with Triton's launch option for it, which not every GPU's
    compiler knows."""
    return {"EARLY": True, "launch_pdl": True} if wanted and machine_of(device).early else {"EARLY": False}


def power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def blocks_of(count: int, size: int) -> int:
    """How many blocks of `size` hold `count`. Trap: `triton.cdiv` and `triton.next_power_of_2` take 2 us each on the host."""
    return -(-count // size)
