"""A graph from disk is the graph of this model as it is now, or it is not used: every kind of change, damage, and a wrong one."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import activations
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mistral import modeling_mistral

from paged_attn import LLM, SamplingParams, patch
from paged_attn.compiled.options import CompileOptions
from paged_attn.engine.runners import traced_runner
from paged_attn.engine.runners.traced_runner import TracedRunner
from paged_attn.graph_cache import cached_graphs, entries
from paged_attn.graph_cache.cached_graphs import CachedGraphs
from paged_attn.graph_cache.entries import VARIABLE, Entries
from paged_attn.graph_cache.graph_data import graph_data
from paged_attn.passes.optional import OPTIONAL
from tests.oracle import greedy, random_prompts
from tests.tiny_models import build

OPTIONS = CompileOptions(inductor=False, passes=OPTIONAL)  # as an engine runs them
ROOT = Path(__file__).parents[2]


def mistral(**config: Any) -> Any:
    return build("mistral", **{"num_hidden_layers": 2, **config})


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TracedRunner, Path]]:
    """The runner that traced, and the cache that it left."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGED_ATTN_CACHE", str(folder))
        yield TracedRunner(mistral(), OPTIONS), folder


@pytest.fixture
def cache(first: tuple[TracedRunner, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that holds the graph of `mistral()`, as the user's."""
    monkeypatch.setenv("PAGED_ATTN_CACHE", str(first[1]))
    return first[1]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str]:
    monkeypatch.setattr(logging.getLogger("paged_attn"), "propagate", True)
    caplog.set_level(logging.INFO, "paged_attn")
    return lambda level: "\n".join(record.getMessage() for record in caplog.records if record.levelno == level)


def no_trace(*_: Any) -> Any:
    raise AssertionError("the model was traced")


def is_found(model: nn.Module, options: CompileOptions = OPTIONS, positions: bool = True) -> bool:
    kept = CachedGraphs.of(model, options, positions)
    return kept is not None and kept.find() is not None


def test_the_graph_from_disk_is_the_traced_one(first: tuple[TracedRunner, Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced_runner, "trace_model", no_trace)
    traced, again = first[0].compiled, TracedRunner(mistral(seed=3), OPTIONS).compiled  # of other weights
    assert graph_data(again.original) == graph_data(traced.original), "the one that it is compared with, too"
    assert again.rewrite.layers == traced.rewrite.layers and again.rewrite.merges == traced.rewrite.merges
    assert again.rewrite.merges and again.specs == traced.specs and again.rewrite.counts == traced.rewrite.counts
    assert again.rewrite.counts["early_logits_gather"] > 0 and again.rewrite.counts["gemv"] > 0
    assert (again.roles, again.max_positions, again.rewrite.form.max_tokens) == (traced.roles, traced.max_positions, None)
    assert (again.rewrite.nodes_before, again.rewrite.nodes_after) == (traced.rewrite.nodes_before, traced.rewrite.nodes_after)
    assert again.rewrite.gm is not None and traced.rewrite.gm is not None and again.split is not None and traced.split is not None
    assert again.rewrite.gm.code.splitlines()[4:] == traced.rewrite.gm.code.splitlines()[4:]  # the first lines have types, too
    assert (again.split.pieces, again.split.breaks, again.split.ops) == (traced.split.pieces, traced.split.breaks, traced.split.ops)


def test_it_gives_the_models_own_tokens(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced_runner, "trace_model", no_trace)
    model, prompts = mistral(seed=5), random_prompts((1, 9, 30))
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    with LLM(model, merge_linears=True, gemv=True, num_pages=64, max_batch_tokens=16) as llm:
        got = llm.generate(prompts, SamplingParams(max_new_tokens=12))
    assert [completion.token_ids for completion in got] == expected


def test_a_hook_that_came_first_changes_nothing(cache: Path) -> None:
    model = mistral()
    with patch(model):
        pass
    assert is_found(model)


def test_a_class_of_models_that_is_made_meanwhile_changes_nothing(cache: Path) -> None:
    model = mistral()
    type("Another", (type(model),), {})(model.config)  # transformers notes what it can record
    assert is_found(model)


def test_another_process_finds_it(tmp_path: Path) -> None:
    """Two processes of their own: this one's modules may have been changed by other tests, and that would be seen."""
    code = (
        "import torch; from tests.graph_cache.test_cached_graphs import *\n"
        "kept = CachedGraphs.of(mistral(), OPTIONS, True)\n"
        "print('key', kept.key, 'found', kept.find() is not None)\n"
        "TracedRunner(mistral(), OPTIONS)\n"
    )
    said = []
    for seed in ("1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), VARIABLE: str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        said.append(done.stdout.split())
    (_, first, _, _), (_, second, _, found) = said
    assert first == second and found == "True"


def same(model: Any) -> Any:
    return model


def attribute(model: Any) -> Any:
    model.model.layers[1].self_attn.scaling *= 2
    return model


def buffer_value(model: Any) -> Any:
    model.model.rotary_emb.inv_freq[1] += 1e-3
    return model


def buffer_moved(model: Any) -> Any:
    rotary = model.model.rotary_emb
    rotary.inv_freq = torch.stack([rotary.inv_freq, rotary.inv_freq], 1)[:, 0]
    return model


def tied(model: Any) -> Any:
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def in_one_storage(model: Any) -> Any:
    layer = model.model.layers[0].mlp
    both = torch.cat([layer.gate_proj.weight.data, layer.up_proj.weight.data])
    layer.gate_proj.weight.data, layer.up_proj.weight.data = both.chunk(2)
    return model


def larger_storage(model: Any) -> Any:
    weight = model.model.layers[0].mlp.gate_proj.weight
    weight.data = torch.cat([weight.data, weight.data])[: len(weight)]
    return model


def transposed(model: Any) -> Any:
    weight = model.model.layers[0].mlp.gate_proj.weight
    weight.data = weight.data.T.contiguous().T
    return model


def other_class(model: Any) -> Any:
    class Norm(modeling_mistral.MistralRMSNorm):  # type: ignore[misc]
        pass

    model.model.norm.__class__ = Norm
    return model


def config_value(model: Any) -> Any:
    model.config.sliding_window = 9
    return model


def other_activation(model: Any) -> Any:
    model.model.layers[0].mlp.act_fn = activations.ACT2FN["gelu"]
    return model


CHANGES = [
    attribute, buffer_value, buffer_moved, tied, in_one_storage, larger_storage, transposed, other_class,
    config_value, other_activation,
    lambda model: model.double(), lambda model: model.requires_grad_(False),
    lambda model: model.set_attn_implementation("eager") or model,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_differs_is_not_given_it(cache: Path, change: Callable[[Any], Any]) -> None:
    assert is_found(mistral())
    model = change(mistral())
    assert not is_found(model), "this change must be in the key"


@pytest.mark.parametrize("config", [{"sliding_window": 9}, {"rope_theta": 2e4}, {"rms_norm_eps": 1e-3}, {"intermediate_size": 64}])
def test_nor_is_one_of_another_config(cache: Path, config: dict[str, Any]) -> None:
    assert not is_found(mistral(**config))


def test_settings_are_in_the_key(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_found(mistral(), CompileOptions(inductor=False, passes=OPTIONAL))
    assert not is_found(mistral(), CompileOptions())
    assert not is_found(mistral(), CompileOptions(passes=OPTIONAL, inductor=True))
    assert not is_found(mistral(), positions=False)
    with torch._dynamo.config.patch(specialize_float=True):
        assert not is_found(mistral())
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_found(mistral())
    assert is_found(mistral())


def test_versions_and_our_sources_are_in_the_key(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "new_package-1.0.dist-info"
    package.mkdir()
    for owner, name, value in (
        (cached_graphs, "_SOURCES", "others"), (torch, "__version__", "2.99.0"), (sys, "path", [*sys.path, str(tmp_path)]),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            cached_graphs._versions.cache_clear()
            assert not is_found(mistral()), name
    cached_graphs._versions.cache_clear()
    assert is_found(mistral())


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return q, k


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (modeling_mistral, "apply_rotary_pos_emb", rotate),  # a function of the model's file
        (modeling_mistral, "F", nn.functional),  # a global that it may read
        (modeling_mistral.MistralMLP, "forward", lambda self, x: self.down_proj(x)),
        (nn.Linear, "forward", lambda self, x: x @ self.weight.T),
        (modeling_mistral.MistralModel, "added", 3),
    ],
)
def test_code_that_was_replaced_is_seen(cache: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: Any) -> None:
    model = mistral()
    assert is_found(model)
    monkeypatch.setattr(owner, name, value, raising=False)
    assert not is_found(model)
    monkeypatch.undo()


def test_a_registered_attention_that_was_replaced_is_seen(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mistral()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *args, **kwargs: None)
    assert not is_found(model)


def hooked(model: Any) -> Any:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 2)
    return model


def forward_on_an_instance(model: Any) -> Any:
    mlp = model.model.layers[0].mlp
    mlp.forward = mlp.forward
    return model


def with_a_lock(model: Any) -> Any:
    model.model.lock = threading.Lock()
    return model


def with_a_subclass(model: Any) -> Any:
    class Quantised(Tensor):
        pass

    model.model.table = torch.zeros(3).as_subclass(Quantised)
    return model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (hooked, "layers.0.mlp has _forward_hooks"),
        (forward_on_an_instance, "layers.0.mlp has forward of its own"),
        (with_a_lock, "model.lock is or holds a _thread.lock"),
        (with_a_subclass, "model.table is or holds a "),
    ],
)
def test_what_no_text_says_all_of_is_not_kept(cache: Path, said: Callable[[int], str], change: Callable[[Any], Any], words: str) -> None:
    assert CachedGraphs.of(change(mistral()), OPTIONS, True) is None
    assert words in said(logging.INFO)


def test_without_a_self_check_or_a_cache_nothing_is_looked_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CachedGraphs.of(mistral(), CompileOptions(passes=OPTIONAL, self_check=False), True) is None
    monkeypatch.setenv("PAGED_ATTN_CACHE", "none")
    assert CachedGraphs.of(mistral(), OPTIONS, True) is None


def entry_of(model: nn.Module) -> Path:
    kept = CachedGraphs.of(model, OPTIONS, True)
    assert kept is not None
    (path,) = kept.entries.folder.glob(f"{kept.key}-*.graph")
    return path


def rewritten(path: Path, change: Callable[[Any], None]) -> None:
    """Another record under the same key, with a right checksum."""
    head, _, body = path.read_bytes().partition(b"\n")
    record = json.loads(body)
    change(record)
    body = json.dumps(record).encode()
    path.write_bytes(entries._head(head.decode().split()[0], body).encode() + b"\n" + body)


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b.replace(b"0.35355", b"0.45355", 1), lambda b: b"", lambda b: b"\xff" + b])
def test_a_damaged_file_is_refused(cache: Path, said: Callable[[int], str], damage: Callable[[bytes], bytes]) -> None:
    path = entry_of(mistral())
    content = path.read_bytes()
    assert damage(content) != content
    path.write_bytes(damage(content))
    assert not is_found(mistral()) and "its checksum is wrong" in said(logging.WARNING)
    path.write_bytes(content)
    assert is_found(mistral())


def test_a_wrong_graph_is_found_by_the_numbers_and_made_anew(cache: Path, said: Callable[[int], str]) -> None:
    path = entry_of(mistral())

    def without_window(record: Any) -> None:
        for layer in record["layers"]:
            layer["spec"]["scale"] *= 1.5

    rewritten(path, without_window)
    runner = TracedRunner(mistral(), OPTIONS)
    assert "loaded from disk" not in runner.compiled.rewrite.seconds, "it was rewritten here"
    assert "was not used, and the model was traced again" in said(logging.WARNING) and "self-check failed" in said(logging.WARNING)
    assert is_found(mistral()), "the new one has taken its place"


def test_a_record_that_can_not_be_read_is_left(cache: Path, said: Callable[[int], str]) -> None:
    path = entry_of(mistral())
    content = path.read_bytes()

    def other_op(record: Any) -> None:
        nodes = record["graph"]["nodes"]
        node = next(node for node in nodes if node[0] == "call_function" and node[2][0] == "op")
        node[2][1:4] = ["nobodys", "op", "default"]

    rewritten(path, other_op)
    assert not is_found(mistral()) and "cannot be used: " in said(logging.WARNING)
    path.write_bytes(content)


def test_the_file_does_not_hold_weights(cache: Path) -> None:
    content = entry_of(mistral()).read_bytes()
    assert len(content) < 200_000
    record = json.loads(content.partition(b"\n")[2])
    assert record["graph"]["buffers"] == {} and len(record["inputs"]) > 20
    assert cache.joinpath("graphs").stat().st_mode & 0o77 == 0


class Slopes(nn.Module):
    """A toy whose attention adds ALiBi from a parameter: what is proved rests on its values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.head = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 20)
        self.slopes = nn.Parameter(torch.tensor([0.5, 0.25]))
        self.offset = nn.Buffer(torch.linspace(0, 1, 16))  # traced as another tensor of the same memory
        self.plain = torch.linspace(1, 2, 16)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(self.embed(input_ids) * self.plain + self.offset).chunk(3, -1))
        distance = position_ids[:, None, None, :] - position_ids[:, None, :, None]
        bias = (distance * self.slopes[:, None, None]).masked_fill(distance > 0, float("-inf"))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, bias)
        logits: Tensor = self.head(attended.transpose(1, 2).flatten(-2))
        return logits


def test_parameters_on_whose_values_a_proof_rests_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_ATTN_CACHE", str(tmp_path))
    traced = TracedRunner(Slopes(), CompileOptions())
    assert traced.layers[0].alibi_slopes == (0.5, 0.25)
    other = Slopes()
    with torch.no_grad():
        other.slopes.mul_(2)
        other.head.weight.mul_(2)
    kept = CachedGraphs.of(other, CompileOptions(), True)
    assert kept is not None and list(kept.entries.read(kept.key)), "the key knows no parameter's values"
    assert kept.find() is None
    assert TracedRunner(other, CompileOptions()).layers[0].alibi_slopes == (1.0, 0.5)
    monkeypatch.setattr(traced_runner, "trace_model", no_trace)
    TracedRunner(Slopes(), CompileOptions())  # both are kept, side by side
    assert TracedRunner(other, CompileOptions()).layers[0].alibi_slopes == (1.0, 0.5)


def test_many_writers_and_readers_at_once(tmp_path: Path, said: Callable[[int], str]) -> None:
    store, wrong = Entries(tmp_path / "graphs"), list[Any]()

    def work(number: int) -> None:
        for turn in range(30):
            store.write("k", "same", {"number": number, "filler": "x" * (1000 * number + turn)})
            wrong.extend(record for _, record in store.read("k") if len(record["filler"]) // 1000 != record["number"])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not said(logging.WARNING)
    assert len(list(store.read("k"))) == 1 and [path.name for path in store.folder.iterdir()] == ["k-same.graph"]


def test_a_folder_that_can_not_be_written_is_no_error(tmp_path: Path, said: Callable[[int], str]) -> None:
    tmp_path.joinpath("file").write_text("")
    assert Entries(tmp_path / "file" / "graphs").write("k", "e", {}) is None
    assert "is not kept in" in said(logging.WARNING) and "PAGED_ATTN_CACHE" in said(logging.WARNING)
