"""Our refusals as they come out of Dynamo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paged_attn.attn_ops.errors import UnsupportedError


@contextmanager
def unwrapped_refusals() -> Iterator[None]:
    """Around a call that may compile: an UnsupportedError of ours comes out as itself, not in Dynamo's BackendCompilerFailed."""
    from torch._dynamo.exc import BackendCompilerFailed

    try:
        yield
    except BackendCompilerFailed as failure:
        if isinstance(failure.inner_exception, UnsupportedError):
            raise failure.inner_exception from None
        raise
