"""Python's garbage collector rests while a model is traced: Dynamo makes objects by the million and drops few, and whenever their number
has grown by a quarter all are looked through again, a tenth of the time that a trace takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Nothing is collected inside; afterwards the collector is on again if it was on before."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
