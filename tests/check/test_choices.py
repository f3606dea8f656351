"""Models that choose (experts) in 16 bits, where another rounding chooses otherwise: no false alarm, and nothing else is excused.

What Inductor compiles rounds otherwise than what it was made from. Without a GPU that is played here: pieces compute in float32 and round
their results alone, or every operation rounds at random.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from paged_attn.check import self_check
from paged_attn.check.compare import suspects
from paged_attn.check.compare.suspects import Exchange, Exchanges
from paged_attn.check.runs.choices import ChosenRun, Perturbation, PerturbedRun, same_choices
from paged_attn.check.runs.served import HowToRun, Original
from paged_attn.check.runs.tapped import TappedRun, Taps, WideRun
from paged_attn.check.runs.traced_served import PiecewiseRun
from tests.check.checked import PASSES, Traced, refused
from tests.check.planted import hook_a_row
from tests.zoo.build import build

MANY = {"num_experts": 64, "num_local_experts": 64, "n_routed_experts": 64, "num_experts_per_tok": 8, "hidden_size": 128}
LAYERS = {"jamba": 4}  # of two kinds, with experts and without
FAMILIES = ("qwen3_moe", "gpt_oss", "mixtral", "jamba", "deepseek_v3")
NOTHING = Taps(())
Play = Callable[[fx.GraphModule], TappedRun]


def as_it_is(_: str, value: Tensor) -> Tensor:
    return value


def in_wide_numbers(piece: fx.GraphModule) -> TappedRun:
    return WideRun(piece, NOTHING, as_it_is, torch.bfloat16)


def rounding_at_random(seed: int) -> Play:
    """In the same way for the same piece and batch, as kernels do."""

    def play(piece: fx.GraphModule) -> TappedRun:
        return PerturbedRun(piece, NOTHING, as_it_is, torch.bfloat16, Perturbation(torch.Generator().manual_seed(seed)))

    return play


class Played:
    """A piece whose results alone have the types that they should have."""

    def __init__(self, piece: fx.GraphModule, play: Play) -> None:
        self.piece, self.play = piece, play

    def __call__(self, *args: Any) -> Any:
        kinds, found = self.piece(*args), self.play(self.piece).run(*args)
        if not isinstance(kinds, (tuple, list)):
            return _like(found, kinds)
        return tuple(_like(each, kind) for each, kind in zip(found, kinds, strict=True))


def _like(value: Any, kind: Any) -> Any:
    return value.to(kind.dtype) if isinstance(value, Tensor) else value


def play_pieces(monkeypatch: pytest.MonkeyPatch, play: Play) -> None:
    fetch = PiecewiseRun.fetch_attr

    def fetched(run: PiecewiseRun, target: str) -> Any:
        found = fetch(run, target)
        return Played(found, play) if isinstance(found, fx.GraphModule) and target not in run._breaks else found

    monkeypatch.setattr(PiecewiseRun, "fetch_attr", fetched)


def many(family: str) -> Any:
    return build(family, **MANY, num_hidden_layers=LAYERS.get(family, 2)).to(torch.bfloat16)


@cache
def traced(family: str) -> Traced:
    return Traced(many(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_that_round_otherwise_are_no_false_alarm(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plays = [in_wide_numbers, *map(rounding_at_random, range(4))]
    for play in plays:
        with monkeypatch.context() as undo:
            play_pieces(undo, play)
            assert refused(traced(family)) == ""


def test_where_latents_follow_experts_another_choice_is_no_false_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and latents are not values of the original graph: what they are made of within a piece is that piece's own in both."""
    checked = Traced(build("deepseek_v3", **MANY, num_hidden_layers=3).to(torch.bfloat16), (*PASSES, "latent_attention"))
    assert any(layer.spec.describe().count("latent") for layer in checked.graph.rewrite.layers)
    for seed in range(4):
        with monkeypatch.context() as undo:
            play_pieces(undo, rounding_at_random(seed))
            assert refused(checked) == ""


def with_equal_experts(family: str) -> Any:
    """A router takes all of the best six, and two of the next six, which are as good as each other: 15 choices, as likely."""
    model = build(family, **MANY, num_hidden_layers=1).to(torch.bfloat16)
    gate = model.get_parameter("model.layers.0.mlp.gate.weight")
    gate.data = gate.data[::6].repeat_interleave(6, 0)[: len(gate)]
    return model


def test_one_choice_of_many_that_are_as_good_is_no_false_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = Traced(with_equal_experts("qwen3_moe"))
    for seed in range(3):
        with monkeypatch.context() as undo:
            play_pieces(undo, rounding_at_random(seed))
            assert refused(checked) == ""
    play_pieces(monkeypatch, rounding_at_random(0))
    monkeypatch.setattr(suspects, "EVERY", suspects.TRIES + suspects.MORE + 1)
    assert "computes something else" in refused(checked)


def test_exchanges_of_what_runs_chose_come_once_and_the_likeliest_first() -> None:
    usual = {"none": X > 2, "best": (X[None, :3], torch.tensor([[0, 1, 2], [3, 4, 5]]))}
    found = Exchanges(usual)
    for row in ([0, 1, 7], [0, 1, 7], [0, 2, 8]):
        found.see({"none": X > 3, "best": (X[None, :3], torch.tensor([row, [3, 4, 5]]))})
    assert found.names == ["best"] and found.untried("best", 1) is None
    given = [found.untried("best", 0) for _ in range(6)]
    assert [(each.left, each.taken) for each in given if each] == [((2,), (7,)), ((2,), (8,)), ((1,), (7,)), ((1,), (8,)), ((2, 1), (7, 8))]
    made = found.made([Exchange("best", 0, (2, 1), (7, 8))])
    assert list(made) == ["best"] and made["best"][1].tolist() == [[0, 8, 7], [3, 4, 5]]
    assert usual["best"][1].tolist() == [[0, 1, 2], [3, 4, 5]]


def model_instead(monkeypatch: pytest.MonkeyPatch, logits: Callable[[Original, Tensor], Tensor], times: int = 1) -> None:
    """What the checks take for the model itself, beside the graph that was traced from it."""
    own = self_check.check_against_model

    def checked(model: Any, original: Original, truth: Any, name: str, settings: Any) -> None:
        for _ in range(times):
            own(partial(logits, original), original, truth, name, settings)

    monkeypatch.setattr(self_check, "check_against_model", checked)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_rounds_otherwise_than_its_graph_is_no_false_alarm(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one expert of few, so that a row is another where another one is chosen."""
    checked = Traced(build(family, num_experts_per_tok=1, num_hidden_layers=LAYERS.get(family, 2)).to(torch.bfloat16))
    generator = torch.Generator().manual_seed(0)
    moved = partial(Perturbation, generator)
    model_instead(monkeypatch, lambda graph, prompt: graph.run(prompt, as_it_is, HowToRun(perturbed=moved())), times=16)
    assert refused(checked) == ""


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_a_model_that_takes_another_expert_than_its_graph_is_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def otherwise(graph: Original, prompt: Tensor) -> Tensor:
        as_before = Perturbation(torch.Generator(), 0.0)
        graph.run(prompt, as_it_is, HowToRun(perturbed=as_before))
        return graph.run(prompt, as_it_is, HowToRun(choices={name: _other_places(each) for name, each in as_before.choices.items()}))

    model_instead(monkeypatch, otherwise)
    assert "the graph that torch.compile traced gives other logits" in refused(traced(family))


def _other_places(chosen: Any) -> Any:
    """Of one row of a router's: the expert beside the one that was chosen first."""
    if isinstance(chosen, Tensor) or len(chosen) != 2 or len(chosen[1]) < 2 or chosen[1].shape[-1] != MANY["num_experts_per_tok"]:
        return chosen
    places = chosen[1].clone()
    places[1, 0] = (places[1, 0] + 1) % MANY["num_experts"]
    return type(chosen)((chosen[0], places))


class OneWrongExpert(TappedRun):
    """One row of each call goes to the expert beside the one that was chosen first."""

    def compute(self, n: fx.Node) -> Any:
        result = super().compute(n)
        if n.target is not torch.topk or result[1].shape[-1] < 2:
            return result
        places = result[1].clone()
        places[1, 0] = (places[1, 0] + 1) % 64
        return result[0], places


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_an_expert_that_no_rounding_chooses_is_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = traced(family)
    play_pieces(monkeypatch, lambda piece: OneWrongExpert(piece, NOTHING, as_it_is))
    assert "computes something else" in refused(checked)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_row_that_a_hook_changes_is_seen_among_rows_that_choose_otherwise(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = many(family)
    assert hook_a_row(model)
    checked = Traced(model)
    play_pieces(monkeypatch, rounding_at_random(0))
    assert "every row must depend only on its own token" in refused(checked)


def test_only_another_choice_is_worth_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without choices the original runs as often as it takes to see what rounding does to a row, and once as it is, for each prompt."""
    runs: list[tuple[int, bool]] = []
    run = suspects.OtherRun

    def counted(original: Any, truth: Any, prompt: int, how: HowToRun) -> Any:
        runs.append((prompt, how.choices is not None))
        return run(original, truth, prompt, how)

    monkeypatch.setattr(suspects, "OtherRun", counted)
    assert "computes something else" in refused(Traced(build("llama", num_hidden_layers=1)), "position")
    prompt = runs[0][0]
    assert [chosen for other, chosen in runs if other == prompt] == [False, True, *[False] * 7]


def test_choices_are_the_same_if_the_same_is_taken() -> None:
    best, other = torch.topk(X, 2, 1), torch.topk(MOVED, 2, 1)
    assert same_choices({}, {}) and same_choices({"best": best}, {"best": (best[0] + 1, best[1])})
    assert not same_choices({"best": best}, {"best": (best[0], other[1])})
    assert not same_choices({"best": best}, {}) and not same_choices({"larger": X > 2}, {"larger": X > 3})


def chosen_in(function: Callable[[Tensor], Any], x: Tensor, moved: Tensor) -> Any:
    """What a graph gives of `x` with the choices that it makes of `moved`."""
    gm = fx.symbolic_trace(function)
    noted = PerturbedRun(gm, NOTHING, as_it_is, torch.float32, Perturbation(torch.Generator(), 0.0))
    noted.run(moved)
    return ChosenRun(gm, NOTHING, as_it_is, noted.perturbation.choices).run(x)


X = torch.tensor([[1.0, 2.0, 3.0], [6.0, 5.0, 4.0]])
MOVED = 7.5 - X


@pytest.mark.parametrize(
    ("function", "axis"),
    [
        (lambda x: torch.topk(x, 2), 1),
        (lambda x: x.topk(1, dim=0), 0),
        (lambda x: torch.sort(x, 1, descending=True), 1),
        (lambda x: x.max(dim=1), 1),
        (lambda x: torch.min(x, 0, keepdim=True), 0),
    ],
)
def test_numbers_that_come_with_places_are_taken_from_there(function: Callable[[Tensor], Any], axis: int) -> None:
    (values, places), (_, expected) = chosen_in(function, X, MOVED), function(MOVED)
    assert torch.equal(places, expected) and not torch.equal(places, function(X)[1]) and torch.equal(values, _at(X, axis, expected))


def _at(x: Tensor, axis: int, places: Tensor) -> Tensor:
    return x.gather(axis, places) if places.dim() == x.dim() else x.gather(axis, places.unsqueeze(axis)).squeeze(axis)


def test_a_comparison_is_taken_again_and_what_follows_is_computed() -> None:
    assert torch.equal(chosen_in(lambda x: torch.where(x > 2.5, x, 0.0), X, MOVED), torch.where(MOVED > 2.5, X, 0.0))


def test_whole_numbers_are_not_moved() -> None:
    gm = fx.symbolic_trace(lambda x: x.float() * 1.0)
    run = PerturbedRun(gm, NOTHING, as_it_is, torch.float32, Perturbation(torch.Generator().manual_seed(0), 4.0))
    assert not torch.equal(run.run(torch.arange(1, 9)), torch.arange(1.0, 9.0))  # the product is
    gm = fx.symbolic_trace(lambda x: x.float())
    run = PerturbedRun(gm, NOTHING, as_it_is, torch.float32, Perturbation(torch.Generator().manual_seed(0), 4.0))
    assert torch.equal(run.run(torch.arange(1, 9)), torch.arange(1.0, 9.0))


def test_counts_are_not_moved() -> None:
    """As gpt_oss finds where an expert's rows begin: a count that is moved below the next whole number would begin them one row earlier."""
    graph = fx.Graph()
    ids, numbers = graph.placeholder("ids"), graph.placeholder("numbers")
    counts = graph.call_function(torch.histc, (ids, 4, 0, 4))
    whole = graph.call_function(torch.cumsum, (counts, 0), {"dtype": torch.int32})
    graph.output((whole, graph.call_function(torch.mul, (numbers, 3.0))))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    given = torch.tensor([0.0, 1, 1, 3, 2, 3, 3]), torch.tensor([300.0, 0.1])
    expected, plain = gm(*given)
    for seed in range(8):
        run = PerturbedRun(gm, NOTHING, as_it_is, torch.float32, Perturbation(torch.Generator().manual_seed(seed), 8.0))
        ends, moved = run.run(*given)
        assert ends.tolist() == expected.tolist() == [1, 3, 4, 7]
        assert not torch.equal(moved, plain)


def test_ones_among_zeros_are_not_moved() -> None:
    """As JetMoE counts an expert's tokens: a one that is moved below one would be none."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    best = graph.call_function(operator.getitem, (graph.call_function(torch.topk, (x, 2)), 1))
    ones = graph.call_method("scatter", (graph.call_function(torch.zeros_like, (x,)), 1, best, 1))
    graph.output(graph.call_method("sum", (graph.call_method("long", (ones,)), 0)))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    for seed in range(8):
        run = PerturbedRun(gm, NOTHING, as_it_is, torch.float32, Perturbation(torch.Generator().manual_seed(seed), 8.0))
        assert int(run.run(torch.rand(5, 4)).sum()) == 10
