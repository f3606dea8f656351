"""Which CUDA device is the current one, on a machine without any: torch.cuda.device is a list of who entered and left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from paged_attn import KVPool
from paged_attn.attn_ops.context import current_context
from paged_attn.attn_ops.current_device import current_device, on_its_device
from paged_attn.backends.attention.torch_native import TorchNativeBackend
from tests.attn_ops.test_context import context

SECOND = torch.device("cuda", 1)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        told.append(f"in {which}")
        try:
            yield
        finally:
            told.append(f"out {which}")

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return told


class Engine:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    @on_its_device
    def step(self, divisor: int, *, more: int = 0) -> int:
        """One step."""
        return 6 // divisor + more


def test_a_method_runs_on_its_device_however_it_ends(entered: list[str]) -> None:
    engine = Engine(SECOND)
    assert engine.step(2, more=4) == 7 and entered == ["in cuda:1", "out cuda:1"]
    with pytest.raises(ZeroDivisionError):
        engine.step(0)
    assert entered == ["in cuda:1", "out cuda:1"] * 2
    assert Engine(torch.device("cpu")).step(3) == 2 and len(entered) == 4
    assert Engine.step.__doc__ == "One step."


def test_nothing_happens_where_cuda_is_not_in_use(entered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with current_device(SECOND):
        assert not entered


def test_a_forward_context_is_on_the_pools_device(entered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVPool, "device", SECOND)
    planned: list[int] = []

    class Backend(TorchNativeBackend):
        def plan_in_graph(self, plan: object) -> None:
            planned.append(len(entered))
            if len(planned) == 2:
                raise RuntimeError("no plan")

    with context(backend=Backend()):
        assert entered == ["in cuda:1"] and planned == [1]
    assert entered == ["in cuda:1", "out cuda:1"]
    with pytest.raises(RuntimeError, match="no plan"):
        context(backend=Backend()).__enter__()
    assert entered == ["in cuda:1", "out cuda:1"] * 2 and current_context() is None
