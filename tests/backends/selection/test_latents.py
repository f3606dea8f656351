"""Latents are kept only where the backend that will run reads them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.capabilities import Feature, Problem
from paged_attn.backends.selection.ranking import ROWS
from paged_attn.backends.selection.registry import backend_class
from paged_attn.backends.selection.requirements import Requirements
from paged_attn.backends.selection.select import pick, select, serves_latents
from tests.backends.latent_problems import PUBLISHED, spec_of

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
    monkeypatch.setattr("paged_attn.backends.selection.select.device_word", lambda device: device.type)
    monkeypatch.setattr("paged_attn.backends.selection.select.architecture_of", lambda device: 90 if device.type == "cuda" else None)
    monkeypatch.setattr("paged_attn.backends.selection.packages.unmet_requirement", lambda _: "triton is not installed")
    assert not serves_latents("auto", cuda), "torch_native would run them, and slowly"
    assert serves_latents("triton", cuda) and serves_latents("torch_native", cuda)
    monkeypatch.setattr("paged_attn.backends.selection.packages.unmet_requirement", lambda _: "")
    assert serves_latents("auto", cuda)


def test_an_unknown_name_is_refused_as_ever() -> None:
    with pytest.raises(ValueError, match="unknown attention backend 'nonsense'"):
        serves_latents("nonsense", CPU)


# What "auto" takes.


def asked(kind: str, architecture: int, dtype: torch.dtype = torch.bfloat16, page_size: int = 16, device: str = "cuda") -> Requirements:
    problem = Problem(spec_of(kind, 16, PUBLISHED), dtype, dtype, page_size, device, architecture)
    return Requirements((problem,), device, architecture, "Test GPU")


@pytest.fixture
def everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged_attn.backends.selection.packages.unmet_requirement", lambda _: "")


@pytest.mark.usefixtures("everything_is_installed")
@pytest.mark.parametrize(
    ("required", "names"),
    [
        (asked("512 + 64", 90), ["triton", "fa3"]),
        (asked("512 + 64", 90, page_size=64), ["triton", "fa3"]),
        (asked("512 + 64", 90, torch.float32), ["triton"]),
        (asked("256 + 64", 90), ["triton"]),
        (asked("512 + 0", 90, torch.float16), ["triton"]),
        (asked("512 + 64", 100), ["triton"]),
        (asked("512 + 64", 103, page_size=128), ["triton"]),
        (asked("512 + 64", 80), ["triton"]),
        (asked("512 + 64", 0, torch.float32, device="cpu"), ["torch_native"]),
    ],
)
def test_auto_takes_by_kernels_and_sizes(required: Requirements, names: list[str]) -> None:
    assert pick(required, required.order(), {})[0] == names


def test_a_refusal_says_how_keys_and_values_are_kept() -> None:
    with pytest.raises(UnsupportedError, match=r"fa3: .*\nWith disable_passes=\('latent_attention',\) keys and values of all heads"):
        select("fa3", Requirements.of([spec_of("256 + 64", 16, PUBLISHED)], torch.bfloat16, torch.bfloat16, 16, CPU))


@pytest.mark.usefixtures("everything_is_installed")
def test_the_order_says_that_it_is_that_of_latents() -> None:
    required = asked("512 + 64", 90, page_size=64)
    order = required.order()
    assert order.why == "the order for Hopper, with latents" and order.decode[:3] == ("fa3", "flash_mla", "triton")
    assert order.extend[:2] == ("triton", "fa3")
    left = required.left_out(["flash_mla", "cutlass_mla", "flash_attn"], order, "fa3")
    assert left["flash_mla"] == "ranked after fa3" and left["cutlass_mla"].startswith("needs SM100, SM103, this GPU is SM90")
    assert "no multi-head latent attention" in left["flash_attn"]
    blackwell = asked("512 + 64", 100, page_size=64)
    left = blackwell.left_out(["trtllm_mla"], blackwell.order(), "triton")
    assert left["trtllm_mla"] == "serves decode, not extend"
    plain = replace(required, problems=(replace(required.problems[0], spec=AttentionSpec(16, 1, 128, 128, 0.1)),))
    assert plain.order().why == "the order for Hopper" and plain.reasons("flash_mla") == ["runs layers of latents only"]


@pytest.mark.usefixtures("everything_is_installed")
def test_names_in_the_orders_of_latents_run_latents_there() -> None:
    for row in ROWS:
        for name in {*row.latents, *row.latents_decode}:
            able = backend_class(name).capabilities
            assert Feature.MLA in able.features
            assert not row.architectures or not able.architectures or row.architectures & able.architectures, (row.why, name)
