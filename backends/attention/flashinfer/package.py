"""The optional package behind these backends."""

from __future__ import annotations

import importlib
from types import ModuleType

from paged_attn.attn_ops.install_line import install_line
from paged_attn.backends.needs import Requirement

REQUIREMENT = Requirement("flashinfer", "0.6.8", install_line("flashinfer"))


def import_flashinfer(backend: str) -> ModuleType:
    """FlashInfer's module.

    Raises:
        ImportError: it is not installed, or does not load; the message holds the install line.
    """
    try:
        return importlib.import_module(REQUIREMENT.module)
    except ImportError as error:
        raise ImportError(
            f"backend {backend!r} needs {REQUIREMENT.module} {REQUIREMENT.version} or newer ({error}): {REQUIREMENT.install}"
        ) from error
