"""Equal pieces are compiled once, with each layer's own tensors, and not at all if they are on disk."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from paged_attn.capture.compiled_pieces import piece_finder
from paged_attn.capture.compiled_pieces import pieces as module
from paged_attn.capture.compiled_pieces.artifacts import ArtifactCache
from paged_attn.capture.compiled_pieces.pieces import PieceReport, compile_pieces, load_pieces
from paged_attn.capture.split.split_graph import SplitGraph, split_graph
from paged_attn.capture.split.split_ops import split_ops
from paged_attn.passes.fx.graph_tools import value_of
from paged_attn.passes.runner import rewrite
from tests.passes.graphs import Traced, ragged_error, trace
from tests.tiny_models import VOCAB, build

_mine = torch.library.Library("pieces_test", "DEF")
_mine.define("double(Tensor x) -> Tensor")
_mine.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
double = torch.ops.pieces_test.double.default


class Eager:
    """A compiler that leaves the piece as it is; what it saves, `load` finds in memory again."""

    def __init__(self, check: Callable[[Sequence[Any]], None] = lambda inputs: None) -> None:
        self.check, self.compiled, self.calls = check, list[fx.GraphModule](), 0

    def __call__(self, piece: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.check(inputs)
        self.compiled.append(piece)
        return Saved(self, len(self.compiled) - 1)

    def load(self, path: Path) -> Any:
        return Saved(self, pickle.loads(path.read_bytes()))


class Saved:
    def __init__(self, owner: Eager, number: int) -> None:
        self.owner, self.number = owner, number

    def __call__(self, *args: Any) -> Any:
        self.owner.calls += 1
        return self.owner.compiled[self.number](*args)

    def save(self, *, path: str, format: str) -> None:
        Path(path).write_bytes(pickle.dumps(self.number))


def compile_model(name: str, compiler: Eager, cache: ArtifactCache | None = None, **config: Any) -> tuple[PieceReport, SplitGraph]:
    """The pieces of a tiny model, whose logits are compared with the model's own."""
    model = build(name, **config)

    def work(traced: Traced) -> tuple[PieceReport, SplitGraph, float]:
        result = rewrite(traced.gm, traced.args, model)
        assert result.gm is not None
        split = split_graph(result.gm, split_ops())
        inputs = [value_of(node) for node in traced.gm.graph.nodes if node.op == "placeholder"]
        report = compile_pieces(split, inputs, cache, compiler)
        return report, split, ragged_error(model, replace(result, gm=split.gm), traced.args, (5, 24, 13), VOCAB)

    report, split, error = trace(model, work, vocabulary=VOCAB, use_cache=False).result
    assert error < 2e-4
    return report, split


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox"])
def test_as_many_compiles_for_six_layers_as_for_two(name: str) -> None:
    short, long = Eager(), Eager()
    few, _ = compile_model(name, short, num_hidden_layers=2)
    many, _ = compile_model(name, long, num_hidden_layers=6)
    assert (few.pieces, many.pieces) == (3, 7)
    assert few.distinct == many.distinct == len(short.compiled) == len(long.compiled) == 3
    assert long.calls % many.pieces == 0 and few.loaded == many.loaded == 0


def test_layers_that_differ_are_compiled_each() -> None:
    compiler = Eager()
    report, _ = compile_model(
        "deepseek_v3", compiler, num_hidden_layers=5
    )  # the first has no experts; the second makes what all others use
    assert 3 < report.distinct == len(compiler.compiled) < report.pieces == 6


def test_a_compiled_piece_is_called_without_a_module() -> None:
    _, split = compile_model("llama", Eager())
    assert all(name in split.gm.__dict__ and name not in split.gm._modules for name in split.pieces)
    assert all(name in split.gm._modules for name in split.breaks)


def test_what_is_on_disk_is_not_compiled(tmp_path: Path) -> None:
    compiler = Eager()
    cache = ArtifactCache(tmp_path, compiler.load)
    cold, _ = compile_model("llama", compiler, cache, num_hidden_layers=2)
    warm, _ = compile_model("llama", compiler, cache, num_hidden_layers=6)  # a longer model of the same layers
    assert (cold.distinct, cold.loaded) == (warm.distinct, warm.loaded - warm.distinct) == (3, 0)
    assert len(compiler.compiled) == 3
    for path in tmp_path.glob("*.piece"):
        path.write_bytes(path.read_bytes()[:-1])
    again, _ = compile_model("llama", compiler, cache, num_hidden_layers=2)
    assert (again.distinct, again.loaded, len(compiler.compiled)) == (3, 0, 6)
    other, _ = compile_model("llama", compiler, cache, num_hidden_layers=2, hidden_size=64)
    assert other.loaded == 0


def test_it_says_beforehand_what_it_will_do(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("paged_attn"), "propagate", True)
    with caplog.at_level(logging.INFO, "paged_attn"):
        report, _ = compile_model("llama", Eager(), num_hidden_layers=6)
    lines = [record.getMessage() for record in caplog.records]
    first = next(i for i, line in enumerate(lines) if line.startswith("compiling 3 distinct pieces of 7;"))
    assert [line.split(" in ")[0] for line in lines[first + 1 : first + 4]] == [f"compiled submod_{n}" for n in (0, 2, 12)]
    assert report.describe() == f"3 distinct of 7 in {report.seconds:.1f} s, 0 of them loaded from disk"


def compile_function(function: Callable[..., Any], args: Sequence[Tensor], compiler: Any, cache: ArtifactCache | None = None) -> Any:
    """Dynamo's graph of a function with its first sizes symbolic, split at `double`: (report, split graph, tensors)."""
    torch._dynamo.reset()
    reports = []

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        split = split_graph(gm, frozenset({double}))
        reports.append(compile_pieces(split, [value_of(n) for n in gm.graph.nodes if n.op == "placeholder"], cache, compiler))
        return split.gm.forward

    for arg in args:
        torch._dynamo.maybe_mark_dynamic(arg, 0)
    with torch.no_grad():
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        assert torch.allclose(compiled(*args), function(*args))
    return reports[-1], compiled, reports


def layers(x: Tensor) -> Tensor:
    for _ in range(3):
        x = double(torch.relu(x) + 1)
    return x - 1


def test_guards_of_the_compiler_are_those_of_whoever_uses_its_work(tmp_path: Path) -> None:
    """A piece that was compiled for fewer than 100 rows serves no more, though the graphs are equal; and Dynamo hears of it."""

    def below_100(inputs: Sequence[Any]) -> None:
        rows = next(value.shape[0] for value in inputs if isinstance(value, Tensor))
        bool(rows < 100)

    compiler = Eager(below_100)
    cache = ArtifactCache(tmp_path, compiler.load)
    cold, *_ = compile_function(layers, [torch.randn(7, 3)], compiler, cache)
    assert (cold.pieces, cold.distinct, cold.loaded) == (4, 2, 0)
    warm, function, reports = compile_function(layers, [torch.randn(9, 3)], compiler, cache)
    assert (warm.distinct, warm.loaded) == (2, 2)
    with torch.no_grad():
        function(torch.randn(50, 3))
        assert len(reports) == 1
        function(torch.randn(150, 3))
    assert len(reports) == 2 and reports[1].loaded == 0, "the loaded piece must not run 150 rows"


def test_a_size_that_the_compiler_makes_a_number_binds_whoever_uses_its_work(tmp_path: Path) -> None:
    def only_this(inputs: Sequence[Any]) -> None:
        int(next(value.shape[0] for value in inputs if isinstance(value, Tensor)))

    compiler = Eager(only_this)
    cache = ArtifactCache(tmp_path, compiler.load)
    compile_function(layers, [torch.randn(7, 3)], compiler, cache)
    same, function, reports = compile_function(layers, [torch.randn(7, 3)], compiler, cache)
    assert same.loaded == 2
    with torch.no_grad():
        function(torch.randn(8, 3))
    assert len(reports) == 2 and reports[1].loaded == 0


def test_pieces_of_user_code_are_shared_but_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "portable", lambda gm: False)
    compiler = Eager()
    cache = ArtifactCache(tmp_path, compiler.load)
    for _ in range(2):
        report, *_ = compile_function(layers, [torch.randn(7, 3)], compiler, cache)
        assert (report.pieces, report.distinct, report.loaded) == (4, 2, 0)
    assert list(tmp_path.iterdir()) == []


def test_what_can_not_be_compared_is_compiled_each_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(piece_finder, "fingerprint", lambda gm, inputs: None)
    compiler = Eager()
    report, *_ = compile_function(layers, [torch.randn(7, 3)], compiler, ArtifactCache(tmp_path, compiler.load))
    assert (report.pieces, report.distinct, len(compiler.compiled)) == (4, 4, 4)


def test_each_layer_gets_the_tensors_that_it_holds_itself() -> None:
    torch._dynamo.reset()
    tables = [torch.randn(3) for _ in range(3)]
    results: list[Any] = []

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        for number, node in enumerate(n for n in list(gm.graph.nodes) if n.target is torch.relu):
            gm.register_buffer(f"table_{number}", tables[number])
            with gm.graph.inserting_after(node):
                added = gm.graph.create_node("get_attr", f"table_{number}")
            with gm.graph.inserting_after(added):
                total = gm.graph.call_function(torch.add, (node, added))
            node.replace_all_uses_with(total, lambda user, total=total: user is not total)
        split = split_graph(gm, frozenset({double}))
        compiler = Eager()
        results.append(compile_pieces(split, [value_of(n) for n in gm.graph.nodes if n.op == "placeholder"], None, compiler))
        return split.gm.forward

    x = torch.randn(5, 3)
    expected = x
    for table in tables:
        expected = double(torch.relu(expected) + table + 1)
    with torch.no_grad():
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.allclose(torch.compile(layers, backend=backend)(x), expected - 1)
    assert (results[0].pieces, results[0].distinct) == (4, 2)


@pytest.mark.slow
def test_inductor_does_not_choose_configurations_while_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would time them on the sizes of the trace."""
    from torch._inductor import config, graph
    from torch._inductor.utils import fresh_cache

    chooses: list[bool | None] = []
    run = graph.GraphLowering.run
    monkeypatch.setattr(graph.GraphLowering, "run", lambda *args: (chooses.append(config.triton.autotune_at_compile_time), run(*args))[1])
    with fresh_cache():
        compile_function(layers, [torch.randn(7, 3)], module.inductor, None)
    assert chooses and not any(chooses)


@pytest.mark.slow
def test_inductors_work_survives_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, and then loaded where nothing else is cached."""
    from torch._inductor.utils import fresh_cache

    cache = ArtifactCache(tmp_path / "ours")
    with fresh_cache():
        cold, function, _ = compile_function(layers, [torch.randn(7, 3)], module.inductor, cache)
    with fresh_cache(), monkeypatch.context() as patched:
        patched.setattr(torch._inductor, "standalone_compile", None)
        warm, function, reports = compile_function(layers, [torch.randn(9, 3)], module.inductor, cache)
        with torch.no_grad():
            for rows in (2, 33):
                x = torch.randn(rows, 3)
                assert torch.allclose(function(x), layers(x))
    assert (cold.distinct, cold.loaded, warm.distinct, warm.loaded, len(reports)) == (2, 0, 2, 2, 1)


def test_pieces_are_loaded_by_what_was_noted_of_them(tmp_path: Path) -> None:
    compiler = Eager()
    cache = ArtifactCache(tmp_path, compiler.load)
    model = build("llama", num_hidden_layers=4)

    def work(traced: Traced) -> float:
        result = rewrite(traced.gm, traced.args, model)
        assert result.gm is not None
        inputs = [value_of(node) for node in traced.gm.graph.nodes if node.op == "placeholder"]
        report = compile_pieces(split_graph(result.gm, split_ops()), inputs, cache, compiler)
        assert report.kept is not None and len(report.kept) == 5 and len({piece.fingerprint for piece in report.kept}) == 3
        split = split_graph(result.gm, split_ops())
        changed = (replace(report.kept[0], guards="False"), *report.kept[1:])
        for other in (report.kept[:-1], changed, (replace(report.kept[0], fingerprint="of another"), *report.kept[1:])):
            assert load_pieces(split, other, cache) is None
        assert all(isinstance(getattr(split.gm, name), fx.GraphModule) for name in split.pieces), "nothing was put half"
        loaded = load_pieces(split, report.kept, cache)
        assert loaded is not None and (loaded.distinct, loaded.loaded, loaded.pieces, loaded.kept) == (3, 3, 5, report.kept)
        assert all(name in split.gm.__dict__ for name in split.pieces) and len(compiler.compiled) == 3
        return ragged_error(model, replace(result, gm=split.gm), traced.args, (5, 24, 13), VOCAB)

    assert trace(model, work, vocabulary=VOCAB, use_cache=False).result < 2e-4
    assert compiler.calls > 0


def test_a_piece_that_can_not_be_kept_is_noted(tmp_path: Path) -> None:
    compiler = Eager()
    report, _ = compile_model("llama", compiler, ArtifactCache(tmp_path, compiler.load))
    assert report.kept is not None
    report, _ = compile_model("llama", compiler, None)
    assert report.kept is None, "nothing is on disk"
    ours = compile_function(lambda x: double(x + 1) * 2, [torch.randn(4, 3)], compiler, ArtifactCache(tmp_path, compiler.load))[0]
    assert ours.kept is not None and len(ours.kept) == 2, "split ops are not part of a piece"
