"""Rows are picked as early as is proved: what moves, what does not, and the same numbers for any rows either way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn.passes.fx.graph_tools import name_of, value_of
from paged_attn.passes.fx.row_layout import has_rows
from paged_attn.passes.optimize import logits_gather as gather
from paged_attn.passes.optimize import row_region
from paged_attn.passes.optimize.logits_gather import gather_logits_early
from tests.passes.graphs import VOCAB, Traced, copied, trace

Use = Callable[[Tensor, Any, Tensor], Any]
CALLS = ((12, (3, 0, 11)), (13, (5, 5, 1, 5)), (7, (0, 1, 2, 3, 4, 5, 6)), (12, (-1, 2)))  # lengths and rows


def chosen(y: Tensor, rows: Tensor) -> Tensor:
    return y[:, rows, :]


class Layers(nn.Module):
    """`use(x, layers, positions)` on an embedding x [1, T, 32], `pick`ed from; linears a (32 -> 32), b (32 -> 16), norm, experts w, v."""

    def __init__(self, use: Use, pick: Callable[[Any, Tensor], Any] = chosen) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use, self.pick = use, pick
        self.embed = nn.Embedding(VOCAB, 32)
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 16)
        self.norm, self.router = nn.LayerNorm(32), nn.Linear(32, 4)
        self.w, self.v = nn.Parameter(torch.randn(4, 32, 24)), nn.Parameter(torch.randn(4, 24, 32))
        self.table = nn.Parameter(torch.randn(4, 24))

    def forward(self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor) -> Any:
        x = self.embed(input_ids).cumsum(1)  # which mixes rows: nothing moves above it
        return self.pick(self.use(x, self, position_ids), logits_to_keep)


def inputs_of(traced: Traced, length: int, rows: tuple[int, ...]) -> list[Any]:
    ids = torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(length))
    given = {"input_ids": ids, "position_ids": torch.arange(length)[None] + 3, "tokens": length, "num_logits": len(rows)}
    given["logits_rows"] = torch.tensor(rows)
    return [given.get(role, arg) for role, arg in zip(traced.form.roles.values(), traced.args, strict=True)]


def moved(use: Use, pick: Callable[[Any, Tensor], Any] = chosen, negative: bool = True, static: bool = False) -> list[str]:
    """Names of the operations that compute N rows before the picking; whatever moved, all results must be what they were."""

    def work(traced: Traced) -> list[list[str]]:
        gm, form, values = copied(traced)
        count = gather_logits_early(gm.graph, form, values)
        gm.graph.lint()
        gm.recompile()
        for length, rows in CALLS[:1] if static else CALLS if negative else CALLS[:-1]:
            args = inputs_of(traced, length, rows)
            for got, wanted in zip(gm.forward(*args), traced.gm.forward(*args), strict=True):
                torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5, equal_nan=True)
        before = {node.name: value_of(node) for node in traced.gm.graph.nodes if node.op.startswith("call")}
        now = {node.name: node for node in gm.graph.nodes}
        names = [name_of(now[n]) for n, v in before.items() if n in now and fewer(v, value_of(now[n]), form.num_tokens)]
        assert bool(count) == bool(names) and count >= len(names)
        return [names]  # in a list, as trace() takes an empty result for none

    rows = torch.tensor(CALLS[0][1])
    if not static:
        torch._dynamo.mark_dynamic(rows, 0)
    return trace(Layers(use, pick), work, logits_to_keep=rows).result[0]  # type: ignore[no-any-return]


def fewer(before: Any, now: Any, tokens: Any) -> bool:
    """Whether a tensor had T rows and has N now."""
    return isinstance(before, Tensor) and has_rows(before, tokens) and not has_rows(now, tokens)


def mlp(x: Tensor, m: Any, _: Tensor) -> Tensor:
    return x + m.a(F.silu(m.norm(x)))


def test_an_mlp_and_a_residual_stream_move() -> None:
    assert moved(mlp) == ["layer_norm", "silu", "linear", "add"]


@pytest.mark.parametrize("pick", [
    lambda y, rows: y[:, rows], lambda y, rows: y[0][rows], lambda y, rows: y.transpose(1, 2)[:, :, rows],
    lambda y, rows: torch.ops.aten.index.Tensor(y, [None, rows]),
])  # fmt: skip
def test_every_spelling_of_picking_is_read(pick: Any) -> None:
    assert moved(mlp, pick)[:4] == ["layer_norm", "silu", "linear", "add"]


@pytest.mark.parametrize("pick", [lambda y, rows: torch.index_select(y, 1, rows), lambda y, rows: y.index_select(-2, rows)])
def test_index_select_is_read(pick: Any) -> None:
    assert moved(mlp, pick, negative=False) == ["layer_norm", "silu", "linear", "add"]


@pytest.mark.parametrize("pick", [
    lambda y, rows: y[:, rows + 1 - 1], lambda y, rows: y[:, rows, :8], lambda y, rows: y[rows * 0], lambda y, rows: y[:, :, rows],
    lambda y, rows: y + rows.sum(),
])  # fmt: skip
def test_anything_else_is_no_picking(pick: Any) -> None:
    assert moved(mlp, pick, negative=False) == []


APART: dict[str, Use] = {
    "another layout": lambda x, m, p: m.a(x).view(1, -1, 4, 8).transpose(1, 2).contiguous().transpose(1, 2).reshape(1, -1, 32).exp(),
    "T in a shape": lambda x, m, p: m.a(x).view(x.shape[1], 32).view(1, x.shape[1], 4, 8).permute(0, 1, 3, 2).reshape(x.shape) * 2,
    "softmax over features": lambda x, m, p: torch.softmax(m.a(x), -1).cumsum(2),
    "sorted features": lambda x, m, p: m.a(x).sort(-1)[0].topk(5)[0].amax(-1, keepdim=True) + x,
    "chunks": lambda x, m, p: torch.cat([each * 2 for each in m.a(x).chunk(2, -1)], -1),
    "unbound": lambda x, m, p: torch.stack(m.a(x).view(1, -1, 2, 16).unbind(2), 2).flatten(2).tanh(),
    "repeated": lambda x, m, p: m.b(x).repeat_interleave(2, -1).repeat(1, 1, 2).relu(),
    "matrices per row": lambda x, m, p: (m.b(x).view(-1, 4, 4) @ m.b(x).view(-1, 4, 4)).reshape(1, -1, 16).exp(),
    "a table": lambda x, m, p: F.embedding(m.router(x).argmax(-1), m.table) + m.table[m.router(x).argmin(-1)],
    "a mask of each row": lambda x, m, p: torch.where(x > x.mean(-1, keepdim=True), m.a(x), torch.zeros_like(x)).masked_fill(x < 0, 1),
    "dropout": lambda x, m, p: F.dropout(m.a(x), 0.5, training=False),
    "one row of weights": lambda x, m, p: torch.addmm(m.a.bias, x[0], m.a.weight)[None].abs(),
    "gathered and scattered": lambda x, m, p: torch.zeros_like(x).scatter(2, m.b(x).topk(3)[1], 1.0).gather(2, m.b(x).topk(3)[1]),
}


@pytest.mark.parametrize("name", APART)
def test_what_treats_rows_apart_moves_as_a_whole(name: str) -> None:
    use = APART[name]
    names = moved(use)
    assert "linear" in names or "addmm" in names
    assert moved(lambda x, m, p: use(x, m, p).double()) == [*names, "double"]


MIXING: dict[str, tuple[Use, list[str]]] = {  # and what comes after the mixing
    "a running sum": (lambda x, m, p: m.a(x).cumsum(1), []),
    "a softmax over tokens": (lambda x, m, p: torch.softmax(m.a(x), 1), []),
    "sorted tokens": (lambda x, m, p: m.a(x).sort(1)[0], []),
    "the best tokens": (lambda x, m, p: m.a(x).argsort(-2), []),
    "reversed": (lambda x, m, p: m.a(x).flip(1), []),
    "shifted": (lambda x, m, p: m.a(x).roll(1, 1), []),
    "scrambled by a view": (lambda x, m, p: m.a(x).view(1, 32, -1).transpose(1, 2), ["transpose"]),
    "normalized over tokens": (lambda x, m, p: F.normalize(m.a(x)), []),
    "products of tokens": (lambda x, m, p: (m.a(x)[0] @ m.a(x)[0].t()) @ m.a(x), []),
    "a sum over tokens": (lambda x, m, p: (m.a(x)[0].t() @ x[0])[None, :1] + x, ["add"]),
    "a convolution": (lambda x, m, p: F.conv1d(m.a(x).transpose(1, 2), m.w[:, :, :3].reshape(32, 4, 3)[:, :1], padding=1, groups=32), []),
    "random numbers": (lambda x, m, p: torch.rand_like(m.a(x)) * 0, ["mul"]),
    "the number of tokens": (lambda x, m, p: m.a(x) * x.shape[1], []),
    "picked otherwise": (lambda x, m, p: m.a(x)[:, torch.arange(x.shape[1]).flip(0)], []),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows_stays_with_all_that_is_before_it(name: str) -> None:
    use, after = MIXING[name]
    pick = (lambda y, rows: y[:, :, rows]) if name == "a convolution" else chosen
    assert moved(lambda x, m, p: use(x, m, p).exp(), pick) == [*after, "exp"]


def test_a_mean_over_tokens_is_read_by_each_row() -> None:
    """It takes all rows of x; what is computed with it does not."""
    assert moved(lambda x, m, p: m.a(x - x.mean(1, keepdim=True))) == ["sub", "linear"]


def test_what_something_else_reads_stays() -> None:
    def pick(y: Tensor, rows: Tensor) -> Any:
        return y[0][:, rows], y[1].sum()

    def use(x: Tensor, m: Any, p: Tensor) -> Any:
        y = m.a(x)
        return mlp(y, m, p), y

    assert moved(use, pick) == ["layer_norm", "silu", "linear", "add"]
    assert moved(lambda x, m, p: (y := mlp(x, m, p), y), pick) == []


def test_two_pickings_of_the_same_rows_move_together() -> None:
    def use(x: Tensor, m: Any, p: Tensor) -> Any:
        y = m.a(x)
        return y, y.exp()

    assert moved(use, lambda y, rows: (y[0][:, rows], y[1][:, rows])) == ["linear", "exp"]


def test_a_tensor_of_the_length_of_the_call_gives_its_rows() -> None:
    """Its rows are picked, not made anew from N."""

    def use(x: Tensor, m: Any, p: Tensor) -> Tensor:
        count = torch.arange(x.shape[1])
        return m.a(x) * count[None, :, None] + torch.ones(x.shape[1], 1).cumsum(0)

    assert moved(use) == ["linear", "getitem", "mul", "add"]


def test_a_matrix_of_tokens_by_tokens_is_not_picked_from() -> None:
    assert moved(lambda x, m, p: (m.a(x) + torch.ones(x.shape[1], x.shape[1]).sum(0)[:, None]).exp()) == ["linear", "getitem", "add", "exp"]
    assert moved(lambda x, m, p: (torch.ones(x.shape[1], x.shape[1]) @ m.a(x)).exp()) == ["exp"]


def test_views_of_weights_are_read_and_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's experts may have 14 GiB."""
    example = gather._example
    monkeypatch.setattr(gather, "_example", lambda node, examples, _: example(node, examples, lambda node: pytest.fail(f"{node} is drawn")))
    assert moved(lambda x, layers, _: F.linear(x, layers.a.weight[:].t()) + layers.table.view(3, 32)[0]) == ["linear", "add"]


def test_views_that_no_copy_allows_become_reshapes() -> None:
    """The picked rows lie otherwise in memory than the transposed ones."""

    def use(x: Tensor, m: Any, p: Tensor) -> Tensor:
        by_head = x.roll(1, 1).view(-1, 4, 8).transpose(0, 1)[None] * torch.ones(1)
        return m.a(by_head.transpose(1, 2).view(1, -1, 32))

    assert "linear" in moved(use)


def test_rows_that_numbers_refute_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a table wrong, the graph would stay as it is."""
    monkeypatch.setattr(row_region, "_REDUCING", {*row_region._REDUCING, "cumsum"})
    monkeypatch.setattr(row_region, "_ALONG", {})
    assert moved(lambda x, m, p: m.a(x).cumsum(1)) == []
    monkeypatch.setattr(gather, "agrees", lambda *_: True)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Tensor-likes are not close"):
        moved(lambda x, m, p: m.a(x).cumsum(1))


def test_shapes_that_do_not_follow_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_region, "_kept", lambda node, rows, tokens: next(iter(rows.values())))
    assert moved(lambda x, m, p: m.a(x).sum(1, keepdim=True).expand(-1, x.shape[1], -1).exp()) == []


def test_results_that_are_not_finite_prove_nothing() -> None:
    assert moved(lambda x, m, p: m.a(x) / 0 - m.a(x) / 0) == []


def test_a_fixed_number_of_rows_is_a_number_in_shapes() -> None:
    assert moved(APART["T in a shape"], static=True) == moved(APART["T in a shape"])


def test_what_autocast_computes_stays() -> None:
    """Evaluated by itself it has another dtype."""

    def use(x: Tensor, m: Any, p: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m.a(x)

    assert moved(use) == []
