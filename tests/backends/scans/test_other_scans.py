"""Scans of other packages: their functions are called as they are documented, and one is taken, or a refusal says why.

In place of the packages stand functions of the same arguments that go token by token in float64, and hold callers to the contract.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn import LLM, SamplingParams, UnsupportedError, explain
from paged_attn.attn_ops.batch.requests import StateCheckpoint
from paged_attn.attn_ops.scans.gated_delta import gated_delta_extend
from paged_attn.attn_ops.scans.kda import kda_extend
from paged_attn.attn_ops.scans.state_rows import Extends
from paged_attn.backends.scans.base import ScanProblem
from paged_attn.backends.scans.fla import FlaScans
from paged_attn.backends.scans.flashinfer import FlashInferScans
from paged_attn.backends.selection import packages as optional_packages
from paged_attn.backends.selection.scans import BUILT_IN, NoBackendFits, kernels_of, scans_backend, select_scan
from paged_attn.recurrent.as_ops import by_ops
from paged_attn.recurrent.layer import RecurrentLayer
from tests.engine.models import assert_idle
from tests.oracle import greedy, random_prompts
from tests.recurrent_models import recurrent

CPU = ScanProblem("gated_delta_rule", (4, 128, 128), torch.bfloat16, "cpu")
HOPPER = dataclasses.replace(CPU, device="cuda", architecture=90)
CALLS: list[str] = []


def by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, state: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence [T, ..] from a state [H, K, V]; g [T, H] or [T, H, K] in logarithms."""
    outputs, heads = [], v.shape[1]
    q, k = (each.double().repeat_interleave(heads // each.shape[1], 1) for each in (q, k))
    state = state.double()
    for token in range(len(v)):
        state = state * g[token].double().exp().reshape(heads, -1, 1)
        given = (v[token].double() - torch.einsum("hkv,hk->hv", state, k[token])) * beta[token].double()[:, None]
        state = state + torch.einsum("hk,hv->hkv", k[token], given)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[token]) * scale)
    return torch.stack(outputs), state


def sequences(given: list[Tensor], cu: Tensor, scale: float, states: Tensor) -> tuple[Tensor, Tensor]:
    assert cu.dtype == torch.int64 and len(states) == len(cu) - 1 and cu[-1] == len(given[0])
    found = [
        by_token(*(each[first:last] for each in given), scale, state)
        for first, last, state in zip(cu[:-1].tolist(), cu[1:].tolist(), states, strict=True)
    ]
    return torch.cat([output for output, _ in found]), torch.stack([after for _, after in found])


def fla_chunked(name: str) -> Any:
    """As `chunk_gated_delta_rule` and `chunk_kda` of fla-core 0.6.0."""

    def chunked(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        CALLS.append(name)
        assert cu_seqlens is not None and cu_seqlens_cpu is not None and cu_seqlens.equal(cu_seqlens_cpu)
        assert initial_state is not None and initial_state.dtype == torch.float32 and output_final_state and scale is not None
        assert len(q) == 1 and g.dim() == (4 if name == "kda" else 3)
        if use_qk_l2norm_in_kernel:
            q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
        output, after = sequences([each[0] for each in (q, k, v, g, beta)], cu_seqlens, scale, initial_state)
        return output[None].to(v.dtype), after.float()

    return chunked


def flashinfer_chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `flashinfer.gdn_prefill.chunk_gated_delta_rule` of 0.6.8.post1: it does not read `use_qk_l2norm_in_kernel`."""
    CALLS.append("flashinfer")
    assert g is not None and beta is not None and cu_seqlens is not None and initial_state is not None and scale is not None
    assert all(each.is_contiguous() for each in (q, k, v, initial_state)) and output_final_state
    assert {g.dtype, beta.dtype, initial_state.dtype} == {torch.float32} and bool((g > 0).all())
    output, after = sequences([q, k, v, g.log(), beta], cu_seqlens, scale, initial_state.transpose(2, 3))
    return output.to(v.dtype), after.transpose(2, 3).float().contiguous()


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both packages are there, in the versions that are needed."""
    recurrent("qwen3_next")  # transformers' own file of it calls fla where that is there when it is imported
    CALLS.clear()
    functions = {
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": fla_chunked("gdn")}, "fla.ops.kda": {"chunk_kda": fla_chunked("kda")},
        "flashinfer.gdn_prefill": {"chunk_gated_delta_rule": flashinfer_chunked}, "fla": {}, "fla.ops": {}, "flashinfer": {},
    }  # fmt: skip
    for name, found in functions.items():
        module = types.ModuleType(name)
        vars(module).update(found)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(optional_packages, "unmet_requirement", lambda _: None)


@pytest.fixture
def anywhere(packages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (FlaScans, FlashInferScans):
        needs = dataclasses.replace(
            cls.needs, devices=frozenset({"cpu"}), architectures=frozenset(), dtypes=frozenset({torch.float32, torch.bfloat16})
        )
        monkeypatch.setattr(cls, "needs", needs)


def problem(by_channel: bool, size: int) -> tuple[list[Tensor], Tensor, Extends]:
    """Three requests: one whose state is kept twice on the way, a fresh one, and one of a token; rows between them are others'."""
    torch.manual_seed(3)
    starts, lengths = [1, 13, 20], [11, 5, 1]
    rows = 22
    g = -F.softplus(torch.randn(rows, 4, *[size] * by_channel))
    given = [torch.randn(rows, 2, size), torch.randn(rows, 2, size), torch.randn(rows, 4, size), g, torch.rand(rows, 4)]
    states = torch.full((7, 4, size, size), float("nan"))
    states[[5, 2]] = torch.randn(2, 4, size, size)
    kept = {0: (StateCheckpoint(3, 1), StateCheckpoint(8, 6)), 1: (StateCheckpoint(4, 4),)}
    return given, states, Extends(starts, lengths, [5, 3, 2], [False, True, False], torch.device("cpu"), kept)


@pytest.mark.parametrize(
    ("name", "truth", "by_channel"),
    [("fla", gated_delta_extend, False), ("fla", kda_extend, True), ("flashinfer", gated_delta_extend, False)],
)
@pytest.mark.parametrize("normalise", [True, False])
def test_prompts_and_states_on_the_way_are_those_of_the_truth(
    anywhere: None, name: str, truth: Any, by_channel: bool, normalise: bool
) -> None:
    given, states, extends = problem(by_channel, 8)
    if not normalise:
        given[:2] = (F.normalize(each, dim=-1) for each in given[:2])
    outputs, kept = [torch.full((22, 4, 8), 7.0) for _ in range(2)], [states, states.clone()]
    truth(*given, outputs[0], normalise, kept[0], extends)
    assert scans_backend(name).kernels()[truth](*given, outputs[1], normalise, kept[1], extends)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kept[1], kept[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert len(CALLS) == 3, "three waves: the longest of the requests has three segments"


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One for each comparison of a layer's ops with its own forward: whether kernels computed them."""
    seen: list[bool] = []
    apart = by_ops.apart

    def noted(layer: RecurrentLayer, served: RecurrentLayer, scopes: Sequence[dict[str, Any]]) -> float:
        seen.append(bool(served.kernels))
        return apart(layer, served, scopes)

    monkeypatch.setattr(by_ops, "apart", noted)
    return seen


@pytest.mark.usefixtures("anywhere")
def test_a_model_is_served_by_a_named_one_token_for_token(comparisons: list[bool]) -> None:
    model, prompts = recurrent("qwen3_next"), random_prompts((1, 5, 17, 33, 70))
    with LLM(model, num_pages=400, page_size=1, max_batch_tokens=16, scans_backend="fla") as llm:
        proved = len(CALLS)
        assert comparisons == [True], "of what computes its ops, and of nothing else"
        for _ in range(2):
            done = llm.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))
            assert [each.token_ids for each in done] == [greedy(model, prompt, 8) for prompt in prompts]
        assert 0 < proved < len(CALLS) and set(CALLS) == {"gdn"}
        assert "    computes   gated_delta_rule by fla (not taken: triton: runs on cuda, hip, not on cpu" in explain(llm)  # or on cpu-amx
        assert_idle(llm.engine)


@pytest.mark.usefixtures("anywhere")
def test_one_that_gives_other_numbers_is_refused(monkeypatch: pytest.MonkeyPatch, comparisons: list[bool]) -> None:
    monkeypatch.setattr(
        sys.modules["fla.ops.gated_delta_rule"], "chunk_gated_delta_rule", lambda **given: fla_chunked("gdn")(**given | {"scale": 1.0})
    )
    with pytest.raises(UnsupportedError, match=r"with scans_backend='fla': .*gated_delta_rule by fla.* is off by .* of its size"):
        LLM(recurrent("qwen3_next"), num_pages=64, scans_backend="fla")
    assert comparisons == [True, False], "without kernels the ops are right"


def test_auto_takes_ours_and_says_why_not_others(packages: None) -> None:
    on_gpu, on_cpu = select_scan("auto", HOPPER), select_scan("auto", CPU)
    assert (on_gpu.name, on_cpu.name) == ("triton", "torch")
    assert on_gpu.rejected == {
        "fla": "not measured beside ours yet; scans_backend='fla' takes it",
        "flashinfer": "not measured beside ours yet; scans_backend='flashinfer' takes it",
        "torch": "ranked after triton",
    }
    assert on_cpu.rejected["fla"] == "runs on cuda, not on cpu" and "flashinfer" in on_cpu.rejected
    assert kernels_of([on_cpu]) == {}
    assert select_scan("auto", dataclasses.replace(HOPPER, op="short_conv", state=(64, 4))).rejected == {"torch": "ranked after triton"}


def test_a_named_one_goes_over_what_computes_the_rest(packages: None) -> None:
    pytest.importorskip("triton")
    conv = dataclasses.replace(HOPPER, op="short_conv", state=(64, 4))
    chosen = [select_scan("fla", each) for each in (HOPPER, conv)]
    assert [each.name for each in chosen] == ["fla", "triton"]
    ours, both = scans_backend("triton").kernels(), kernels_of(chosen)
    assert both.keys() == ours.keys()
    assert {truth for truth in ours if both[truth] is not ours[truth]} == {gated_delta_extend, kda_extend}
    assert kernels_of([select_scan("torch", each) for each in (HOPPER, conv)]) == {}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("fla", {"device": "cpu", "architecture": None}, "runs on cuda, not on cpu"),
        ("fla", {"state": (4, 512, 128)}, "keys of 512, at most 256"),
        ("flashinfer", {"architecture": 80}, "needs SM90, this GPU is SM80"),
        ("flashinfer", {"dtype": torch.float32}, "dtype float32 is not among bfloat16, float16"),
        ("flashinfer", {"state": (4, 64, 128)}, "keys of 64 and values of 128, known is 128"),
    ],
)
def test_what_is_asked_for_and_does_not_fit_is_refused(packages: None, name: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=f"scans_backend='{name}' cannot compute gated_delta_rule with .*: .*{words}"):
        select_scan(name, dataclasses.replace(HOPPER, **change))


def test_none_is_taken_for_what_none_computes() -> None:
    with pytest.raises(NoBackendFits, match=r"no backend computes gated_delta_rule with .*; torch: dtype float64 is not among"):
        select_scan("auto", dataclasses.replace(CPU, dtype=torch.float64))


def test_a_missing_package_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "paged_attn.backends.selection.packages.unmet_requirement", lambda need: f"{need.module} is not installed: {need.install}"
    )
    with pytest.raises(UnsupportedError, match=r"fla is not installed: pip install .*\[fla\]"):
        select_scan("fla", HOPPER)


def test_names_and_models_that_have_nothing_for_them() -> None:
    with pytest.raises(ValueError, match="unknown scans_backend 'acme'; known are 'auto', 'triton', 'fla', 'flashinfer', 'torch'"):
        LLM(recurrent("lfm2"), num_pages=64, scans_backend="acme")
    with pytest.raises(UnsupportedError, match=r"scans_backend='fla' computes gated_delta_rule, kda; .* have short_conv\. Leave"):
        LLM(recurrent("lfm2"), num_pages=64, scans_backend="fla")
    assert [scans_backend(name).name for name in BUILT_IN] == [*BUILT_IN]
