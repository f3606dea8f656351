"""Latents are kept only where the backend that will run reads them."""

from __future__ import annotations

import pytest
import torch

from paged_attn.backends.selection.latents import serves_latents

CPU = torch.device("cpu")


SERVES = {
    "auto": True,
    "torch_native": True,
    "reference": True,
    "flex": False,
    "triton": True,
    "fa3,triton": True,
    "fa3,flash_mla": True,
    "flashinfer": True,
    "flash_attn,triton": False,
    "torch_native,reference": True,
    "torch_native,flex": False,
}


@pytest.mark.parametrize(("name", "serves"), SERVES.items())
def test_on_a_cpu(name: str, serves: bool) -> None:
    assert serves_latents(name, CPU) is serves


def test_on_a_gpu_auto_needs_kernels_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr("paged_attn.backends.selection.latents.device_word", lambda device: device.type)
    monkeypatch.setattr("paged_attn.backends.selection.latents.architecture_of", lambda device: 90 if device.type == "cuda" else None)
    monkeypatch.setattr("paged_attn.backends.selection.latents.unmet_requirement", lambda _: "triton is not installed")
    assert not serves_latents("auto", cuda), "torch_native would run them, and slowly"
    assert serves_latents("triton", cuda) and serves_latents("torch_native", cuda)
    monkeypatch.setattr("paged_attn.backends.selection.latents.unmet_requirement", lambda _: "")
    assert serves_latents("auto", cuda)


def test_an_unknown_name_is_refused_as_ever() -> None:
    with pytest.raises(ValueError, match="unknown attention backend 'nonsense'"):
        serves_latents("nonsense", CPU)
