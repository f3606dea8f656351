"""Before a model's first step its kernels are compiled: those that its steps will launch, and nothing is launched for it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, UnsupportedOperatorException

pytest.importorskip("triton")
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention import base
from paged_attn.backends.attention.base import AttentionBackend, StoringBackend
from paged_attn.backends.attention.hybrid import hybrid_of
from paged_attn.backends.attention.latent.expanded import FreshPrompts
from paged_attn.backends.attention.reference import ReferenceBackend
from paged_attn.backends.attention.triton.backend import TritonBackend
from paged_attn.backends.attention.triton.tiling import Tiling, tiling
from paged_attn.backends.compiling import compile_ahead
from paged_attn.check.runs.steps import lengths_of_steps
from paged_attn.compiled import rewritten_graph, steps_ahead
from paged_attn.compiled.steps_ahead import DECODED, STEPS, RunsWith, compile_steps_ahead
from tests.backends.gpus import GPUS
from tests.backends.without_gpu import printed_by
from tests.compiled.traced import steps_of, traced
from tests.engine.model.dual_chunk_code import made
from tests.zoo.build import build

CPU = torch.device("cpu")


def asked(model: Any, monkeypatch: pytest.MonkeyPatch, backend: Callable[[], AttentionBackend] = TritonBackend) -> Counter[str]:
    """By kernel, how often steps would launch it."""
    launched: list[str] = []

    monkeypatch.setattr(compile_ahead, "JITFunction", object)  # also for the interpreter's
    monkeypatch.setattr(compile_ahead, "_compile", lambda kernel, *_: launched.append(kernel.__name__))
    monkeypatch.setattr(steps_ahead, "select", lambda *_, **__: SimpleNamespace(backend=backend()))
    runner = traced(model)
    assert runner.compiled.rewrite.gm is not None
    compile_steps_ahead(runner.compiled.rewrite.gm.graph, runner.layers, model.dtype, CPU, steps_of(runner, 4))
    return Counter(launched)


@pytest.mark.parametrize("model_type", ("llama", "gemma2", "gpt_oss", "bloom"))
def test_every_kind_of_attention_runs_on_fake_tensors(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(build(model_type), monkeypatch)
    assert found["attend"] >= len(STEPS) and found["deal_decodes"]
    assert found["count_units"] + found["count_together"] == found["deal_work"] and found["deal_work"] + found["deal_decodes"] >= len(STEPS)


def test_latents_run_on_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(build("deepseek_v2"), monkeypatch)
    assert found["attend_latent"] == found["merge_latent"] > len(STEPS)


def test_biases_of_the_graph_run_on_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """ALiBi in 16 bits is not a multiple of the distance any more, and stays a table."""
    assert asked(build("bloom").to(torch.bfloat16), monkeypatch)["attend"] >= len(STEPS)


def test_prompts_whose_latents_are_expanded_run_on_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FreshPrompts] = []
    of = FreshPrompts.of
    monkeypatch.setattr(FreshPrompts, "of", lambda *given: made.append(of(*given)) or made[-1])
    asked(build("deepseek_v2", kv_lora_rank=64), monkeypatch)
    assert len(made) > 1 and any(each.real is not None for each in made)


def test_dual_chunks_have_three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(made(), monkeypatch)["attend"] >= 2 * len(STEPS)


@pytest.mark.parametrize(
    ("model_type", "kernels"),
    (
        ("qwen3_next", {"conv_step", "conv_extend", "conv_state", "gated_delta_kernel", "solve_chunks", "scan_chunks", "attend"}),
        ("bamba", {"conv_step", "conv_extend", "conv_state", "mamba2_kernel", "chunk_states", "chunk_outputs", "attend"}),
        ("mamba", {"conv_step", "conv_extend", "conv_state", "mamba1_kernel", "scan_channels"}),
        ("lfm2", {"conv_step", "conv_extend", "conv_state", "attend"}),
    ),
)
def test_scans_run_on_fake_states(model_type: str, kernels: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(build(model_type), monkeypatch)
    assert set(found) - {"count_units", "count_together", "deal_work", "deal_decodes", "attend_together", "store_kernel"} == kernels


def test_layers_that_are_alike_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (asked(build("llama", num_hidden_layers=layers), monkeypatch) for layers in (1, 4))
    assert few == many


def test_backends_that_do_not_compile_so_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not asked(build("llama"), monkeypatch, ReferenceBackend)


def test_of_two_backends_the_steps_of_the_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (*STEPS, *lengths_of_steps(CPU))
    decodes = sum(all(new == 1 and cached for cached, new in step) for step in steps)
    found = asked(build("llama"), monkeypatch, lambda: hybrid_of(ReferenceBackend(), TritonBackend()))
    assert found["attend"] + found["attend_together"] == decodes and not found["store_kernel"]
    found = asked(build("deepseek_v2"), monkeypatch, lambda: hybrid_of(TritonBackend(), ReferenceBackend()))
    assert found["attend_latent"] == found["merge_latent"] > len(steps) - decodes


class NoFakes(ReferenceBackend):
    """As kernels of other packages, which have no form for fake tensors."""

    def forward(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("a fake tensor")

    plan = forward  # type: ignore[assignment]


@pytest.mark.parametrize(("model_type", "more"), [("llama", {}), ("deepseek_v2", {"kv_lora_rank": 64})])
@pytest.mark.parametrize("pair", [(TritonBackend, NoFakes), (NoFakes, TritonBackend)])
def test_the_other_one_meets_no_fake_tensors(model_type: str, more: dict[str, int], pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of latents that begins a prompt has decodes in a part of their own."""
    assert asked(build(model_type, **more), monkeypatch, lambda: hybrid_of(*(each() for each in pair)))


class OfAnotherPackage(NoFakes, StoringBackend):
    """Its K and V are stored by our kernel."""

    write_kv = StoringBackend.write_kv
    forward = AttentionBackend.forward
    forward_extend = forward_decode = plan = NoFakes.plan


def test_what_is_stored_for_another_package_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, stored = (*STEPS, *lengths_of_steps(CPU)), list[int]()
    decodes = sum(all(new == 1 and cached for cached, new in step) for step in steps)
    monkeypatch.setattr(base, "store_kv", lambda pool, layer_id, *_: stored.append(layer_id))
    asked(build("llama"), monkeypatch, lambda: hybrid_of(OfAnotherPackage(), TritonBackend()))
    assert stored == [0] * (len(steps) - decodes)


@pytest.mark.parametrize("error", [UnsupportedOperatorException("an op of another package"), DataDependentOutputException(None)])
def test_an_operation_without_a_form_for_fakes_costs_time_and_no_start(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rewritten_graph, "compile_steps_ahead", Mock(side_effect=error))
    rewritten_graph._compile_kernels(fx.Graph(), (), torch.float32, CPU, RunsWith("auto", 4, False))
    assert "kernels of this model are not compiled ahead, so that it starts later" in caplog.text
    monkeypatch.setattr(rewritten_graph, "compile_steps_ahead", Mock(side_effect=RuntimeError("another one")))
    with pytest.raises(RuntimeError, match="another one"):
        rewritten_graph._compile_kernels(fx.Graph(), (), torch.float32, CPU, RunsWith("auto", 4, False))


def test_scans_are_compiled_whoever_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, beside = (asked(build("qwen3_next"), monkeypatch, backend) for backend in (ReferenceBackend, TritonBackend))
    assert alone["conv_step"] == beside["conv_step"] > 0 and not alone["attend"] and beside["attend"]


@pytest.mark.parametrize(("dim", "window"), [(64, None), (64, 128), (128, None), (128, 512), (256, None), (256, 512)])
@pytest.mark.parametrize("gpu", ["h100", "l4"])
def test_every_tiling_of_a_decode_step_is_compiled(gpu: str, dim: int, window: int | None) -> None:
    """For any number of heads, a short context or a long one, and a full batch."""
    for heads in (1, 2, 4, 8, 16, 20, 32, 40, 64):
        spec = AttentionSpec(2 * heads, heads, dim, dim, scale=0.1, sliding_window=window)

        def of(step: Sequence[tuple[int, int]], spec: AttentionSpec = spec) -> Tiling:
            lengths = [cached + new for cached, new in step]
            return tiling("one", spec, torch.bfloat16, 1, max(lengths), sum(lengths), GPUS[gpu].machine, len(lengths))

        ahead = {of(step) for step in DECODED}
        for requests, length in itertools.product((1, 2, 4, 8, 16, 32, 64), (10, 100, 300, 600, 1000, 2000, 4000, 16_000)):
            assert of([(length, 1)] * requests) in ahead, (heads, requests, length)


def test_a_refusal_is_left_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise UnsupportedError("none fits")

    assert not asked(build("llama"), monkeypatch, refuse)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ("llama", "deepseek_v2"))
def test_steps_find_their_kernels_compiled(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # another one may have what is not compiled ahead
    (told,) = printed_by("tests.compiled.compile_steps", "h100", model_type)
    assert told["failed"] == [] and told["later"] == {} and told["ahead"].count("attend_hopper") == 2
