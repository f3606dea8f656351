"""Graphs of models with recurrent layers are kept, and mean the layers that this process found."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paged_attn import LLM, SamplingParams
from paged_attn.compiled.options import CompileOptions
from paged_attn.engine.runners import traced_runner
from paged_attn.engine.runners.traced_runner import TracedRunner
from paged_attn.graph_cache.cached_graphs import graph_key
from paged_attn.graph_cache.entries import VARIABLE, _head
from paged_attn.passes.fx.graph_tools import dtype_of
from tests.graph_cache.test_cached_graphs import no_trace
from tests.oracle import greedy, random_prompts
from tests.recurrent_models import recurrent
from tests.zoo.build import build

NAME = "lfm2"
OPTIONS = CompileOptions(inductor=False, passes=("scans",))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[TracedRunner, Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(folder))
        return TracedRunner(recurrent(NAME), OPTIONS), folder


@pytest.mark.parametrize(("name", "disabled"), [("lfm2", ()), ("bamba", ("scans",))], ids=["by ops", "by its own forward"])
def test_another_start_gives_the_models_tokens_without_a_trace(
    name: str, disabled: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    settings: dict[str, Any] = {"disable_passes": disabled, "num_pages": 64, "max_requests": 4, "max_batch_tokens": 16}
    model, prompts = copy.deepcopy(recurrent(name)), random_prompts((1, 9, 30, 17))
    with LLM(model, **settings) as llm:
        scans = llm.engine.runner.compiled.rewrite.counts["scans"]  # type: ignore[attr-defined]
    monkeypatch.setattr(traced_runner, "trace_model", no_trace)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    with LLM(model, **settings) as llm:
        assert llm.engine.runner.compiled.rewrite.counts["scans"] == scans and bool(scans) == (not disabled)  # type: ignore[attr-defined]
        got = llm.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert [completion.token_ids for completion in got] == [greedy(model, prompt, 8) for prompt in prompts]


def test_numbers_have_their_own_types_in_the_checks_of_a_graph_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decays are float32 in a model of 16 bits: computed wider, and given to an op that takes no others, they must not come as 16 bits."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    model = build("qwen3_next").to(torch.bfloat16)
    types: list[dict[str, torch.dtype | None]] = []
    for _ in range(2):
        with LLM(model, num_pages=64, max_requests=4, max_batch_tokens=16) as llm:
            graph = llm.engine.runner.compiled.original.graph  # type: ignore[attr-defined]
        types.append({node.name: dtype_of(node) for node in graph.nodes if (dtype_of(node) or torch.int64).is_floating_point})
        monkeypatch.setattr(traced_runner, "trace_model", no_trace)
    assert types[0] == types[1]
    decays = [node.args[3].name for node in graph.nodes if "gated_delta_rule" in str(node.target)]
    assert decays and {types[1][name] for name in decays} == {torch.float32}


def test_what_a_trace_sees_of_a_layer_is_in_the_key(first: tuple[TracedRunner, Path]) -> None:
    model, layers = first[0].model, first[0].recurrent
    own = graph_key(model, OPTIONS, True, layers)
    assert own == graph_key(model, OPTIONS, True, layers)
    wider = dataclasses.replace(layers[0].spec.states[0], shape=(1, 2, 3))
    for change in (
        {"ops": ()}, {"ops": ("another",)}, {"output_dtype": torch.bfloat16}, {"unused": frozenset({"mask"})},
        {"spec": dataclasses.replace(layers[0].spec, states=(wider,))}, {"spec": dataclasses.replace(layers[0].spec, module="elsewhere")},
    ):  # fmt: skip
        assert graph_key(model, OPTIONS, True, (dataclasses.replace(layers[0], **change), *layers[1:])) != own, change  # type: ignore[arg-type]
    assert graph_key(model, OPTIONS, True, layers[::-1]) != own != graph_key(model, OPTIONS, True, layers[1:])


def test_a_planted_graph_of_layers_that_are_not_there_is_traced_anew(
    first: tuple[TracedRunner, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = first[1].joinpath("graphs").glob("*.graph")
    head, _, body = path.read_bytes().partition(b"\n")
    record = json.loads(body)
    number = len(first[0].recurrent) - 1
    (last,) = [node for node in record["graph"]["nodes"] if "short_conv_with_output" in json.dumps(node) and node[3]["tuple"][-2] == number]
    last[3]["tuple"][-2] = number + 1
    tmp_path.joinpath("graphs").mkdir(mode=0o700)
    body = json.dumps(record).encode()
    tmp_path.joinpath("graphs", path.name).write_bytes(_head(head.decode().split()[0], body).encode() + b"\n" + body)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(traced_runner, "trace_model", no_trace)
    with pytest.raises(AssertionError, match="the model was traced"):
        TracedRunner(recurrent(NAME), OPTIONS)
