"""The former location of `first_rank_leads`: import it from `paged_attn` instead."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "first_rank_leads":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("paged_attn.parallel.lead goes with the next release: from paged_attn import first_rank_leads", DeprecationWarning, 2)
    return importlib.import_module("paged_attn.engine.lead").first_rank_leads
