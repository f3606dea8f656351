"""Starts Inductor's processes for compiling Triton kernels before Inductor needs them."""

from __future__ import annotations


def start_workers() -> None:
    """Start them early, because they take some five seconds, during which Inductor would compile kernels one by one in this process."""
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.use_process_pool()
