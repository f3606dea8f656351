"""Starts Inductor's Triton compile processes before Inductor needs them."""

from __future__ import annotations


def start_workers() -> None:
    """Until they answer, some five seconds after it asks for them, Inductor compiles one kernel after the other in the process itself."""
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.use_process_pool()
