"""What a tape says of a call, what two tapes have in common, and what a program makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.engine.tracing.looping.calls import NotProved
from paged_attn.engine.tracing.looping.common_steps import Times, TwoTapes
from paged_attn.engine.tracing.looping.program import ExpertsSite, program_of
from paged_attn.engine.tracing.looping.prove import refuse_other_branches
from paged_attn.engine.tracing.looping.tape import Slot, Tape, slots_in


def recorded(function: Any, tokens: int = 7, **named: Tensor) -> tuple[Tape, Any]:
    x = torch.randn(tokens, 4, generator=torch.Generator().manual_seed(tokens))
    tape = Tape({"x": x, **named})
    with tape:
        result = function(x)
    return tape, result


def test_views_writes_and_results_are_told() -> None:
    def call(x: Tensor) -> Tensor:
        flat = x.view(-1)
        flat += 1
        values, ids = x.topk(2)
        return values * ids.float()

    tape, result = recorded(call)
    names = [step.function.__name__ for step in tape.steps]
    assert names == ["view", "add_", "topk", "float", "mul"]
    assert tape.steps[1].written == {Slot(1)} and tape.same_memory(Slot(0)) == {Slot(0), Slot(1)}
    assert tape.steps[2].several and len(tape.steps[2].results) == 2 and tape.steps[2].given == {Slot(0)}
    assert tape.slot_of(result) == tape.steps[-1].results[0] and tape.origin[0] == "x"


def test_what_is_made_of_what_experts_gave_is_known() -> None:
    tape = Tape({}, watched=8)
    with tape:
        total, other = torch.zeros(2, 4), torch.zeros(2, 4)
        view = total.view(1, 2, 4)
        with tape.expert() as given:
            made = given(torch.ones(1, 4))
        total.index_add_(0, torch.tensor([1]), made * 2)
        last = view + 1
    assert {tape.slot_of(each) for each in (total, view, made, last)} <= tape.tainted and tape.slot_of(other) not in tape.tainted
    assert [(slot, state.sum().item()) for _, slot, state in tape.states] == [
        (tape.slot_of(total), 8.0), (tape.slot_of(view), 8.0), (tape.slot_of(last), 16.0),
    ]  # fmt: skip


def test_steps_before_and_behind_a_loop_are_common_and_sizes_become_multiples() -> None:
    def call(x: Tensor) -> Tensor:
        rows = x.reshape(x.shape[0] * 2, 2)
        for _ in range(x.shape[0] % 5):
            rows = rows + 1
        return rows.view(x.shape[0], 4).expand(3, x.shape[0], 4)

    tapes = [recorded(call, tokens)[0] for tokens in (7, 11)]
    common = TwoTapes((tapes[0], tapes[1]), (7, 11)).common()
    steps = tapes[0].steps
    assert [steps[index].function.__name__ for index in sorted(common)] == ["reshape", "add", "view", "expand"]
    assert common[0].args == (Slot(0), Times(2), 2) and common[len(steps) - 1].args[1:] == (3, Times(1), 4)
    with pytest.raises(ValueError, match="7 and 12"):
        TwoTapes((tapes[0], tapes[1]), (7, 11)).generalised(7, 12)
    per_expert = TwoTapes((tapes[0], tapes[1]), (7, 11), experts=4)
    assert per_expert.generalised(3 * 7 // 4, 3 * 11 // 4) == Times(3, 4) and per_expert.generalised(7, 11) == Times(1)
    with pytest.raises(ValueError, match="5 and 9"):
        per_expert.generalised(5, 9)


def test_a_program_holds_for_any_number_of_tokens() -> None:
    """The op takes an expert that doubles; a step in front, a loop that is not taken over, and a step behind stay."""

    def call(x: Tensor, tape: Tape) -> tuple[Tensor, Any]:
        rows = x * 3
        weights, ids = rows.topk(1)
        total = torch.zeros(x.shape[0], 4)
        for row in range(x.shape[0]):
            with tape.expert() as given:
                made = given(torch.ones(1, 4))
            total[row] += made[0]
        return total + 1 - x.sum(-1, keepdim=True), (rows, ids, weights, total)

    tapes, parts = [], []
    for tokens in (7, 11):
        x = torch.randn(tokens, 4)
        tape = Tape({"x": x}, watched=tokens * 4)
        with tape:
            result, made = call(x, tape)
        tapes.append(tape)
        parts.append([tape.slot_of(each) for each in (*made, result)])
    step = next(step for step, slot, _ in reversed(tapes[0].states) if slot == parts[0][3])
    common = TwoTapes((tapes[0], tapes[1]), (7, 11)).common()
    found = ExpertsSite(*parts[0][:3], False, parts[0][3], step)
    program = program_of(tapes[0], common, found, ["x"], 0, parts[0][4], 4, (*Gating("identity", False).arguments, "one_by_one"))
    x = torch.randn(5, 4)
    doubling = (torch.eye(4) * 2).expand(4, 4, 4)
    got = program.gm(x, doubling, torch.eye(4).expand(4, 4, 4), None, None)
    assert torch.allclose(got, 2 * (x * 3) * (x * 3).topk(1).values + 1 - x.sum(-1, keepdim=True), atol=1e-5)


def site_of(tape: Tape, ids: Tensor, weights: Tensor) -> ExpertsSite:
    return ExpertsSite(Slot(0), tape.slot_of(ids), tape.slot_of(weights), False, Slot(0), 0)


def test_branches_on_the_choice_are_allowed_and_others_are_not() -> None:
    def chosen(x: Tensor) -> Any:
        weights, ids = x.topk(2)
        for expert in ids.unique().tolist():
            if (ids == expert).any() and weights[:, 0].sum() > 1e9:
                torch.where(ids == expert)
        counts = ids.new_zeros(x.shape[0], 4).scatter_(1, ids, 1).sum(0)
        return counts.numpy(), ids, weights

    tape, (_, ids, weights) = recorded(chosen)
    assert len(tape.looked) > 3
    refuse_other_branches(tape, site_of(tape, ids, weights))

    def others(x: Tensor) -> Any:
        weights, ids = x.topk(2)
        return bool(x.max() > 3), ids, weights

    tape, (_, ids, weights) = recorded(others)
    with pytest.raises(NotProved, match=r"may branch on numbers \(__bool__\)"):
        refuse_other_branches(tape, site_of(tape, ids, weights))


def test_slots_in_nested_arguments() -> None:
    assert slots_in(((Slot(1), [Slot(2)]), {"a": slice(None, Slot(3))})) == {Slot(1), Slot(2), Slot(3)}


def test_a_step_can_be_made_to_give_something_else() -> None:
    linear = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    with torch.no_grad(), Tape({}, {0: torch.ones(2, 3)}):
        assert torch.equal(linear(x) * 2, torch.full((2, 3), 2.0))
