"""Processes that compile are begun before weights are read, in the cache that this process names, and only for engines that compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from paged_attn import LLM
from paged_attn.backends.compiling import compile_ahead
from paged_attn.engine import llm
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.model import loading
from paged_attn.engine.runners import compilers


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is begun, in order, on a machine with a GPU."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compilers.inductor, "pin_triton_cache", lambda: found.append("cache"))
    monkeypatch.setattr(compile_ahead, "start_workers", lambda: found.append("ours"))
    monkeypatch.setattr(compilers.inductor, "start_workers", lambda: found.append("Inductor's"))
    return found


@pytest.mark.parametrize("device", [None, "cuda", torch.device("cuda:0")])
def test_the_cache_is_named_first(device: Any, begun: list[str]) -> None:
    compilers.start_compilers(device, EngineConfig())
    assert begun == ["cache", "ours", "Inductor's"]


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [("cpu", {}, []), ("cuda", {"compile": False}, []), ("cuda", {"inductor": False}, ["cache", "ours"])],
)
def test_who_does_not_compile_has_none(device: str, settings: dict[str, Any], expected: list[str], begun: list[str]) -> None:
    compilers.start_compilers(device, EngineConfig(**settings))
    assert begun == expected


def test_no_gpu_no_processes(begun: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    compilers.start_compilers("cuda", EngineConfig())
    compilers.start_compilers(None, EngineConfig())
    assert begun == []


def test_a_model_from_a_path_is_read_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []

    class Read(Exception):
        pass

    def load(*_: Any, **__: Any) -> Any:
        raise Read

    monkeypatch.setattr(llm, "start_compilers", lambda device, config: order.append((device, config.page_size)))
    monkeypatch.setattr(loading, "checkpoint_task", lambda path, task, options: ("generate", None))
    monkeypatch.setattr(loading, "load_model", load)
    with pytest.raises(Read):
        LLM("somewhere", device="cpu", page_size=32)
    assert order == [(torch.device("cpu"), 32)]
