"""Small results for the host, written to its pinned memory by a kernel: before and after a copy a GPU idles for 6 to 8 us (H200)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from paged_attn.backends.devices import device_word
from paged_attn.backends.fast_launch import FastKernel, device_index
from paged_attn.backends.host_memory.deliver_kernel import deliver_numbers
from paged_attn.backends.host_memory.held import HeldMemory
from paged_attn.backends.machine import machine_of

BLOCK = 512
MOST_BYTES = 16 << 10
DTYPES = frozenset({torch.int64, torch.int32, torch.float32})

_deliver = FastKernel(deliver_numbers)
_written = HeldMemory()


def serves(tensors: Sequence[Tensor]) -> bool:
    """Whether `deliver` writes these. All or none: a copy beside the kernel would cost what the kernel saves."""
    return all(
        device_word(each.device) == "cuda" and each.dtype in DTYPES and each.is_contiguous() and 0 < each.nbytes <= MOST_BYTES
        for each in tensors
    )


def deliver(tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
    """Write each tensor to `hosts`, pinned, of the same shapes and dtypes. The host may read them once an event that is recorded next has
    passed; until then, hand them to `hold`."""
    for tensor, host in zip(tensors, hosts, strict=True):
        early, count = machine_of(tensor.device).early, tensor.numel()
        _deliver(
            (tensor.dtype, early), (triton.cdiv(count, BLOCK), 1), (tensor, host, count), {"BLOCK": BLOCK, "EARLY": early},
            {"num_warps": 4, "launch_pdl": early}, device_index(tensor.device),
        )  # fmt: skip


def hold(hosts: Sequence[Tensor], event: torch.cuda.Event) -> None:
    """Keep memory that `deliver` writes until `event`, even if nobody waits for it."""
    _written.hold(hosts, event)
