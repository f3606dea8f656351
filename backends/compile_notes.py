"""Which variants of kernels lie in Triton's cache on disk: an empty file for each, so that a second start asks no process for them.

A note that is wrong, since Triton would compile the kernel anew (another assembler, a part of its cache that is gone), costs time alone:
the launch compiles it.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from hashlib import sha256
from pathlib import Path

import triton
from triton import knobs
from triton.runtime import JITFunction


def note_of(kernel: JITFunction, told: Hashable, constants: Hashable, target: object) -> Path:
    """Where the note of a variant lies, within Triton's cache.

    Args:
        told: what Triton looks at of the arguments; with `constants`, whatever makes another variant has another `repr`.
        target: the GPU, as Triton knows it.
    """
    of = (kernel.__module__, kernel.__name__, kernel.cache_key, told, constants, target, triton.__version__, sys.implementation.cache_tag)
    return Path(knobs.cache.dir, "compiled_ahead", sha256(repr(of).encode()).hexdigest())
