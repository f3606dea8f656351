"""The optional package behind these backends."""

from __future__ import annotations

import importlib
from types import ModuleType

from paged_attn.backends.needs import FLASHINFER


def import_flashinfer(backend: str) -> ModuleType:
    """FlashInfer's module.

    Raises:
        ImportError: it is not installed, or does not load; the message holds the install line.
    """
    try:
        return importlib.import_module(FLASHINFER.module)
    except ImportError as error:
        raise ImportError(
            f"backend {backend!r} needs {FLASHINFER.module} {FLASHINFER.version} or newer ({error}): {FLASHINFER.install}"
        ) from error
