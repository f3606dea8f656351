"""Inductor's processes are asked for."""

from __future__ import annotations

import pytest
from torch._inductor.async_compile import AsyncCompile

from paged_attn.capture.inductor.triton_cache import start_workers


def test_they_are_asked_whether_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which makes them, and does not wait."""
    asked: list[bool] = []
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: asked.append(True))
    start_workers()
    assert asked == [True]
