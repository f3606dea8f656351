"""FlashInfer's wrapper objects: made once, planned once per step, and never planned again while the last plan is still needed."""

from __future__ import annotations

import importlib
import logging
import threading
import weakref
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any

import torch

from paged_attn.backends.needs import FLASHINFER

logger = logging.getLogger("paged_attn")

MIN_WORKSPACE = 128 << 20
SLOTS = 3  # steps that the host may be ahead of the device before it waits
SECONDS = {"decode": 25, "fa3": 94}  # compile times measured on an H200 host
_announced: set[tuple[str, tuple[str, ...]]] = set()


def import_flashinfer(backend: str) -> ModuleType:
    """FlashInfer's module.

    Raises:
        ImportError: it is not installed, or does not load; the message has the install line.
    """
    try:
        return importlib.import_module(FLASHINFER.module)
    except ImportError as error:
        raise ImportError(
            f"backend {backend!r} needs {FLASHINFER.module} {FLASHINFER.version} or newer ({error}): {FLASHINFER.install}"
        ) from error


class Slot:
    """One wrapper. FlashInfer's plan fills its pinned buffer and starts to copy it; the next plan must wait for that copy."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.wrapper = wrapper
        self._device = device
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._owner: weakref.ref[object] | None = None

    @property
    def is_owned(self) -> bool:
        return self._owner is not None and self._owner() is not None

    @property
    def is_copied(self) -> bool:
        return self._copied is None or self._copied.query()

    def wait(self) -> None:
        """Waits until the device has the last plan; returns at once for a new slot."""
        if self._copied is not None:
            self._copied.synchronize()

    def give_to(self, owner: object) -> None:
        self._owner = weakref.ref(owner)

    def plan(self, *arguments: Any, **options: Any) -> None:
        """Calls the wrapper's `plan`, whose copy the next one waits for."""
        self.wrapper.plan(*arguments, **options)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))  # the stream that FlashInfer copies on


class WrapperPool:
    """Slots by key, and one float workspace per device and stream. A plan owns its slots while it lives, so contexts may nest."""

    def __init__(self) -> None:
        self._slots: dict[Hashable, list[Slot]] = {}
        self._workspaces: dict[Hashable, torch.Tensor] = {}
        self._lock = threading.Lock()

    def take(self, key: Hashable, owner: object, device: torch.device, make: Callable[[], Any]) -> Slot:
        """A free slot, created by `make` if there is none; `owner` keeps it until it is garbage-collected."""
        key = (key, *_device_key(device))
        slot = self._free(key, owner)
        if slot is None:
            slot = Slot(make(), device)  # not under the lock: it may compile
            slot.give_to(owner)
            with self._lock:
                self._slots.setdefault(key, []).append(slot)
        return slot

    def _free(self, key: Hashable, owner: object) -> Slot | None:
        with self._lock:
            slots = self._slots.get(key, [])  # the oldest plan first
            unowned = [slot for slot in slots if not slot.is_owned]
            slot = next((slot for slot in unowned if slot.is_copied), None)
            if slot is None and len(unowned) >= SLOTS:
                slot = unowned[0]
                slot.wait()
            if slot is not None:
                slot.give_to(owner)
                slots.remove(slot)
                slots.append(slot)
            return slot

    def workspace(self, device: torch.device, size: int) -> torch.Tensor:
        """Zeroed uint8 of at least `size` bytes, shared by everything on the current stream of the device."""
        key = _device_key(device)
        with self._lock:
            buffer = self._workspaces.get(key)
            if buffer is None or buffer.numel() < size:
                buffer = self._workspaces[key] = torch.zeros(max(size, MIN_WORKSPACE), dtype=torch.uint8, device=device)
            return buffer


def announce(kernel: str, *words: str) -> None:
    """Logs once per process, before the first use of a kernel for these words, that it may be compiled now."""
    if (kernel, words) in _announced:
        return
    _announced.add((kernel, words))
    seconds = SECONDS.get(kernel)
    logger.info(
        "flashinfer: first use of its %s kernel for %s; unless it is in FlashInfer's cache (~/.cache/flashinfer) it is compiled now%s",
        kernel, ", ".join(words), f", which takes about {seconds} s" if seconds else ", which may take minutes",
    )  # fmt: skip


def _device_key(device: torch.device) -> tuple[Hashable, ...]:
    return (device, torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else (device,)
