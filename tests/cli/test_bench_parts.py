"""The parts of `paged-attn bench` that run in one process: workloads, timing, tables and the chart."""

from __future__ import annotations

import json
import types
import xml.etree.ElementTree as ElementTree
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paged_attn.bench import measure as measuring
from paged_attn.bench.launch import Outcome
from paged_attn.bench.measure import latencies, measure, spread
from paged_attn.bench.results.chart import draw
from paged_attn.bench.results.compare import agreement, record
from paged_attn.bench.results.tables import lines
from paged_attn.bench.shapes import SHAPE_NAMES, shape_config
from paged_attn.bench.systems import model_source
from paged_attn.bench.systems.job import ModelSource, Sampling, Task
from paged_attn.bench.systems.model_source import load, random_model, read_config, write_shape
from paged_attn.bench.systems.systems import PEERS, SYSTEMS, peers
from paged_attn.bench.workloads import GROUPS, SCALES, Workload, chosen
from paged_attn.hashing.model_text import model_text

EVEN = Workload("throughput", 2, 5, 5, 3)


def test_a_second_start_knows_a_shape_again(tmp_path: Path) -> None:
    """Its config is in another temporary folder each time, and what a model is made of is the key of its graph."""
    shapes = [write_shape("tiny", "float32", tmp_path / name, layers=1) for name in ("one", "two")]
    texts = [model_text(load(ModelSource(path, True, "float32", "cpu"))) for path in shapes]
    assert texts[0] == texts[1]


# Workloads


def test_the_full_scale_is_that_of_the_peers_table() -> None:
    names = [workload.name for workload in SCALES["full"]]
    assert names == [
        "latency 1 x 512 + 128", "throughput 8 x 512 + 128", "throughput 32 x 512 + 128", "throughput 128 x 512 + 128",
        "mixed 256 x 64-1,024 + 128", "prefix 64 x 2,048+32 + 64", "long 1 x 8,192 + 1", "prefix 64 x 4 of 2,048+32 + 64",
        "long 8 x 16,000 + 64",
    ]  # fmt: skip
    for scale in SCALES.values():
        assert {workload.group for workload in scale} == set(GROUPS)
        assert len({workload.name for workload in scale}) == len(scale)


def test_prompts_are_the_same_every_time_and_of_the_lengths_asked_for() -> None:
    mixed = Workload("mixed", 40, 3, 9, 2, shared=4)
    prompts = mixed.prompts(30, 7)
    assert prompts == mixed.prompts(30, 7) and prompts != mixed.prompts(30, 8)
    assert {len(prompt) for prompt in prompts} == set(range(7, 14)) and {tuple(prompt[:4]) for prompt in prompts} == {tuple(prompts[0][:4])}
    assert {token for prompt in prompts for token in prompt} == set(range(30))
    assert mixed.longest == 15 and mixed.new_tokens == 80 and not mixed.is_even and EVEN.is_even


def test_beginnings_in_turns() -> None:
    several = Workload("prefix", 7, 2, 2, 4, shared=5, prefixes=3)
    prompts = several.prompts(1000, 7)
    assert len({tuple(prompt[:5]) for prompt in prompts}) == 3 and prompts[0][:5] == prompts[3][:5] == prompts[6][:5]
    assert several.name == "prefix 7 x 3 of 5+2 + 4" and several.longest == 11


def test_numbers_of_the_caller_replace_those_of_the_scale() -> None:
    assert [w.name for w in chosen("smoke", ["throughput", "long"])] == ["throughput 3 x 12 + 4", "long 1 x 40 + 1"]
    assert [w.name for w in chosen("full", ["throughput"], requests=[2, 5], input_len=(7, 9), output_len=6)] == [
        "throughput 2 x 7-9 + 6", "throughput 5 x 7-9 + 6",
    ]  # fmt: skip
    both = chosen("smoke", ["prefix", "latency"], shared_len=11)
    assert [(w.group, w.shared) for w in both] == [("prefix", 11), ("latency", 0)]
    with pytest.raises(ValueError, match="--workload speed is unknown; allowed are latency"):
        chosen("smoke", ["speed"])


def test_peers_are_named() -> None:
    assert peers("vllm, transformers,vllm") == ["vllm", "transformers"] and peers("all") == list(PEERS) and peers("") == []
    with pytest.raises(ValueError, match=r"--compare sglang is unknown; allowed are transformers.*, or all"):
        peers("vllm,sglang")


def test_what_can_not_run_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = replace(SYSTEMS["vllm"], package="surely_no_such_package")
    assert entry.missing("cuda") == f"not installed; {entry.install}" and "pip install vllm" in entry.install
    assert "this is a run on cpu" in str(replace(entry, package="json").missing("cpu"))
    assert replace(entry, package="json").missing("cuda:1") is None
    assert "padded" in str(SYSTEMS["transformers-generate"].refuses(replace(EVEN, high=9)))
    assert SYSTEMS["transformers-generate"].refuses(EVEN) is None and SYSTEMS["transformers"].refuses(replace(EVEN, high=9)) is None


def test_every_shape_is_a_config_of_a_causal_lm(tmp_path: Path) -> None:
    for shape in SHAPE_NAMES:
        config = read_config(write_shape(shape, "bfloat16", tmp_path / shape))
        (architecture,) = config.architectures
        assert architecture.endswith("ForCausalLM") and config.dtype == torch.bfloat16, shape


def test_a_shape_without_room_on_the_gpu_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(config: Any, dtype: str, device: str) -> Any:
        if device != "meta":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return random_model(config, dtype, device)

    monkeypatch.setattr(model_source, "random_model", full)
    source = ModelSource(write_shape("mixtral-8x7b", "bfloat16", tmp_path / "x"), True, "bfloat16", "cuda")
    with pytest.raises(ValueError, match="random weights take 93 GB, more than cuda has free; cut the shape with --layers"):
        load(source)


def test_a_shapes_first_layers(tmp_path: Path) -> None:
    config = read_config(write_shape("gpt-oss-20b", "bfloat16", tmp_path / "cut", layers=5))
    assert config.num_hidden_layers == 5 and config.layer_types == ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    assert shape_config("bamba-9b", 20)["attn_layer_indices"] == [9, 18]
    assert shape_config("nemotron-h-8b", 8)["hybrid_override_pattern"] == "M-M-M-M*"
    for layers in (0, 33):
        with pytest.raises(ValueError, match=rf"--layers is {layers}; llama-3.1-8b has 32, and 1 to 32 are allowed"):
            shape_config("llama-3.1-8b", layers)


# Timing


class Clockwork:
    """A system whose runs take the seconds given, on a clock of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seconds: float, free: bool = False, lost: int = 0) -> None:
        self.now, self.seconds, self.stamps_are_free, self.lost = 100.0, list(seconds), free, lost
        self.runs: list[tuple[int, bool]] = []
        monkeypatch.setattr(measuring, "time", types.SimpleNamespace(perf_counter=lambda: self.now))

    @contextmanager
    def ready(self, prompts, new, *, stamped):
        self.now += 1000.0  # what is prepared is not timed

        def run():
            self.runs.append((new, stamped))
            begun, each = self.now, self.seconds[len(self.runs) - 1] / new
            self.now += each * new
            stamps = [[begun + each * (i + 1) for i in range(new)] for _ in prompts]
            return [[7] * (new - self.lost) for _ in prompts], stamps if stamped else None

        yield run


def test_the_median_of_warm_runs_and_the_stamps_of_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    system = Clockwork(monkeypatch, 50.0, 3.0, 1.0, 2.0, 6.0)
    timed = measure(system, Task(replace(EVEN, new=20), [[1], [2]]), 3, 60.0, "it")
    assert system.runs == [(16, False), (20, False), (20, False), (20, False), (20, True)]
    assert (timed.seconds, timed.runs, timed.tokens_per_second) == (2.0, [3.0, 1.0, 2.0], 20.0)
    assert timed.first_token == pytest.approx({"p50": 0.3, "p90": 0.3, "p99": 0.3})
    assert timed.between_tokens == pytest.approx({"p50": 0.3, "p90": 0.3, "p99": 0.3})


def test_slow_systems_are_repeated_less(monkeypatch: pytest.MonkeyPatch) -> None:
    system = Clockwork(monkeypatch, 9.0, 25.0, 25.0, 25.0, 25.0)
    assert measure(system, Task(EVEN, [[1]]), 5, 60.0, "it").runs == [25.0, 25.0] and system.runs[-1] == (3, True)
    slow = Clockwork(monkeypatch, 9.0, 99.0)
    timed = measure(slow, Task(EVEN, [[1]]), 5, 60.0, "it")
    assert timed.runs == [99.0] and timed.first_token is None and timed.between_tokens is None


def test_free_stamps_need_no_run_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    system = Clockwork(monkeypatch, 9.0, 3.0, 6.0, free=True)
    timed = measure(system, Task(EVEN, [[1]]), 2, 60.0, "it")
    assert system.runs == [(3, False), (3, True), (3, True)]
    assert timed.first_token == pytest.approx(dict.fromkeys(("p50", "p90", "p99"), 2.0))


def test_another_number_of_tokens_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"it gave \[2\] new tokens where 3 were asked for"):
        measure(Clockwork(monkeypatch, *[1.0] * 5, lost=1), Task(EVEN, [[1]]), 2, 60.0, "it")


def test_percentiles() -> None:
    assert spread([3.0, 1.0, 2.0]) == pytest.approx({"p50": 2.0, "p90": 2.8, "p99": 2.98})
    first, between = latencies(10.0, [[11.0, 12.0, 15.0], [13.0]])
    assert first["p50"] == 2.0 and between == pytest.approx({"p50": 2.0, "p90": 2.8, "p99": 2.98})
    assert latencies(10.0, [[11.0]])[1] is None


# What comes of it


def outcomes() -> list[Outcome]:
    def timed(seconds: float, tokens: list[list[int]]) -> dict[str, Any]:
        ms = {"p50": 0.001, "p90": 0.002, "p99": 0.003}
        return {"seconds": seconds, "tokens_per_second": 6 / seconds, "first_token": ms, "between_tokens": None, "tokens": tokens}

    facts = {"versions": {"torch": "2.13"}}
    ours = Outcome("paged_attn", {EVEN.name: timed(0.5, [[1, 2, 3], [4, 5, 6]])}, start_seconds=3.0, facts=facts, device_bytes=2**30)
    peer = Outcome("vllm", {EVEN.name: timed(1.0, [[1, 2, 3], [4, 9, 6]])}, {"other": "not its kind"}, start_seconds=9.0, facts=facts)
    return [ours, peer, Outcome("transformers", failed="not installed; pip install it <now>")]


SETTINGS = {
    "machine": {"device": "H200 & Co"}, "model": {"name": "tiny", "dtype": "float32"}, "settings": {"seed": 3}, "command": "bench",
    "decoding": "greedy",
}  # fmt: skip


def test_agreement_counts_up_to_the_first_difference() -> None:
    assert agreement([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 6]]) == {"tokens": pytest.approx(4 / 6), "requests": 0.5}


def test_record_and_tables() -> None:
    found = record(outcomes(), [EVEN], frozenset({"paged_attn", "vllm"}), SETTINGS)
    assert found["ratios"] == {"vllm": {EVEN.name: 2.0}, "transformers": {}}
    assert found["equal_tokens"]["vllm"][EVEN.name]["requests"] == 0.5
    assert "tokens" not in found["systems"]["vllm"]["timed"][EVEN.name] and json.loads(json.dumps(found)) == found
    text = "\n".join(lines(found))
    for words in (
        "H200 & Co, tiny, float32, greedy, seed 3, ",
        f"{EVEN.name}  12.0 (0.500)  6.0 (1.000) x2.00",
        "paged_attn  1.00 / 2.00 / 3.00  -",
        "paged_attn  3.0            -         1.00        torch 2.13",
        "same greedy tokens from paged_attn and vllm, up to the first difference in a request: 66.7%",
        "transformers: not installed; pip install it <now>",
        "vllm without other: not its kind",
    ):
        assert words in text, f"{words!r} not in\n{text}"
    without = record(outcomes(), [EVEN], frozenset({"paged_attn"}), SETTINGS)
    assert "same greedy tokens" not in "\n".join(lines(without))


def test_chart() -> None:
    found = record(outcomes(), [EVEN], frozenset(), SETTINGS)
    text = draw(found)
    assert text == draw(found)
    bars = [node for node in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}rect") if node.get("rx")]
    assert [float(bar.get("width")) for bar in bars] == [510.0, 255.0]
    for words in ("H200 &amp; Co, tiny, float32", EVEN.name, "12 tokens/s, 0.500 s<", "6 tokens/s, 1.000 s, x2.00<", "vllm"):
        assert words in text, words
    with pytest.raises(ValueError, match="nothing was timed"):
        draw(found | {"systems": {}})


def test_sampling_is_told_to_each_system_by_its_own_words() -> None:
    greedy, drawn = Sampling(), Sampling(0.8, top_k=20)
    assert (str(greedy), str(drawn)) == ("greedy", "temperature 0.8, top-k 20")
    assert greedy.given == {} and drawn.given == {"temperature": 0.8, "top_k": 20}
    assert greedy.for_transformers == {"do_sample": False}
    assert drawn.for_transformers == {"do_sample": True, "temperature": 0.8, "top_p": 1.0, "top_k": 20}
