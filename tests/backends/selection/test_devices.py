"""Devices in words: CUDA, ROCm under CUDA's name, CPUs with and without AMX, and what this machine has."""

from __future__ import annotations

import pytest
import torch

from paged_attn.backends.devices import architecture_of, device_name, device_word, devices_here

GPU, CPU = torch.device("cuda:1"), torch.device("cpu")


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9) if device.index == 0 else (10, 3))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


def test_cuda() -> None:
    assert (device_word(GPU), architecture_of(GPU), device_name(GPU)) == ("cuda", 103, "GPU 1")
    assert architecture_of(torch.device("cuda:0")) == 89
    assert devices_here() == {"cpu": [], "cuda": [89, 103]}


def test_rocm_goes_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert (device_word(GPU), architecture_of(GPU)) == ("hip", None)
    assert devices_here() == {"cpu": [], "hip": []}


@pytest.mark.parametrize(("amx", "word"), [(True, "cpu-amx"), (False, "cpu")])
def test_cpus(monkeypatch: pytest.MonkeyPatch, amx: bool, word: str) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (device_word(CPU), architecture_of(CPU)) == (word, None) and device_name(CPU).startswith("CPU ")
    assert devices_here() == {word: []}


def test_others_go_by_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_word(torch.device("xpu")) == "xpu" and architecture_of(torch.device("xpu")) is None
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert devices_here()["xpu"] == []
