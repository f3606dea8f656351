"""What equal pieces return is told by one run, and is what each would return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._guards import TracingContext

from paged_attn.capture.compiled_pieces import piece_finder
from paged_attn.capture.compiled_pieces.piece_finder import Piece, pieces_of
from paged_attn.capture.split.split_graph import split_graph
from paged_attn.capture.split.split_ops import split_ops
from paged_attn.passes.fx.graph_tools import value_of
from paged_attn.passes.runner import rewrite
from tests.capture.test_pieces import double
from tests.passes.graphs import Traced, trace
from tests.tiny_models import VOCAB, build


def found_in(gm: fx.GraphModule, split_at: frozenset[Any], traced: fx.GraphModule, monkeypatch: pytest.MonkeyPatch) -> list[Piece]:
    """Its pieces; the same as without a word of what equal ones return."""
    inputs = [value_of(node) for node in traced.graph.nodes if node.op == "placeholder"]
    found = pieces_of(split_graph(gm, split_at), inputs)
    with monkeypatch.context() as patched:
        patched.setattr(piece_finder, "_are_new", lambda outputs, inputs: False)
        each = pieces_of(split_graph(gm, split_at), inputs)
    assert [piece.fingerprint for piece in found] == [piece.fingerprint for piece in each]
    assert None not in {piece.fingerprint for piece in found}, "or it says nothing"
    assert [list(map(str, piece.sizes.symbols)) for piece in found] == [list(map(str, piece.sizes.symbols)) for piece in each]
    return found


def runs_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is run, as it is."""
    runs: list[str] = []
    run = fx.Interpreter.call_module
    monkeypatch.setattr(fx.Interpreter, "call_module", lambda self, target, *given: (runs.append(target), run(self, target, *given))[1])
    return runs


# In GPT-NeoX the values that attention gets lie inside of the product: their offset is kept.
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_as_many_runs_for_five_layers_as_for_three(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for count in (3, 5):
        model = build(name, num_hidden_layers=count)

        def work(traced: Traced, model: Any = model) -> tuple[int, int]:
            result = rewrite(traced.gm, traced.args, model)
            assert result.gm is not None
            runs = runs_of(monkeypatch)
            found = found_in(result.gm, split_ops(), traced.gm, monkeypatch)
            pieces = {piece.name for piece in found}
            first = [name for name in runs if name in pieces][: -len(found)]  # the second walk runs all
            return len(first), len({piece.fingerprint for piece in found})

        counts.append(trace(model, work, vocabulary=VOCAB, use_cache=False).result)
        monkeypatch.undo()
    assert counts[0] == counts[1] and counts[0][0] == counts[0][1]


def of_function(function: Callable[..., Any], args: Sequence[Tensor], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Piece], list[str]]:
    """Its pieces, split at `double`, and the names of those that were run."""
    torch._dynamo.reset()
    results: list[tuple[list[Piece], list[str]]] = []

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        runs = runs_of(monkeypatch)
        found = found_in(gm, frozenset({double}), gm, monkeypatch)
        pieces = {piece.name for piece in found}
        results.append((found, [name for name in runs if name in pieces][: -len(found)]))
        return gm.forward

    for arg in args:
        torch._dynamo.mark_dynamic(arg, 0)
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(*args)
    return results[-1]


def test_outputs_that_are_inputs_are_seen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether two tensors share memory is part of what a piece is compiled for."""

    def function(x: Tensor) -> Tensor:
        for _ in range(3):
            x = double(x.view(-1, 3)) + double(x.add_(1))
        return x - 1

    found, runs = of_function(function, [torch.randn(7, 3)], monkeypatch)
    assert len(runs) >= 3 and len({piece.fingerprint for piece in found}) < len(found)


def test_outputs_that_share_memory_are_seen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(3):
            left, right = (x + 1).chunk(2, dim=1)
            x = torch.cat((double(left), double(right)), 1) * 2
        return x - 1

    found, runs = of_function(function, [torch.randn(7, 4)], monkeypatch)
    distinct = len({piece.fingerprint for piece in found})
    assert distinct < len(found) and len(runs) > distinct


def test_equal_pieces_of_other_symbols_are_seen_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(3):
            x = double(torch.relu(x))
            y = double(torch.relu(y))
        return x, y

    found, runs = of_function(function, [torch.randn(7, 3), torch.randn(5, 3)], monkeypatch)
    assert (len({piece.fingerprint for piece in found}), len({piece.sizes.symbols for piece in found}), len(runs)) == (1, 2, 2)


def test_sizes_made_of_numbers_in_tensors_are_left_pending_by_no_run() -> None:
    """Inductor refused the first piece of JetMoe, whose experts get parts of a list of lengths: of all pieces' symbols none was bound."""
    pending: list[int] = []

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        pieces_of(split_graph(gm, frozenset({double})), [value_of(node) for node in gm.graph.nodes if node.op == "placeholder"])
        fake_mode = TracingContext.get().fake_mode
        assert fake_mode is not None and fake_mode.shape_env is not None
        pending.append(len(fake_mode.shape_env.pending_fresh_unbacked_symbols))
        return gm.forward

    def in_parts(x: Tensor, counts: Tensor) -> Tensor:
        first, second = x.split(counts.tolist())
        return double(torch.cat([first + 1, second])) * 2

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        torch.compile(in_parts, backend=backend, fullgraph=True)(torch.ones(5), torch.tensor([2, 3]))
    assert pending == [0]
