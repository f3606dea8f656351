"""As many threads as are fastest, found by trying, and PyTorch's own number again after every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from paged_attn.engine.steps import thread_choice
from paged_attn.engine.steps.thread_choice import RETRY, ThreadChoice
from tests.engine.models import make_engine, oracle, run_all

MOST = 8


class Machine:
    """A clock, on which a step takes what `seconds` says of its threads and rows."""

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self.seconds, self.now = seconds, 0.0
        self.counts: list[int] = []

    def run(self, choice: ThreadChoice, rows: int = 1) -> int:
        with choice.for_step(rows):
            self.counts.append(torch.get_num_threads())
            self.now += self.seconds(self.counts[-1], rows)
        assert torch.get_num_threads() == MOST
        return self.counts[-1]

    def choice(self, **given: int) -> ThreadChoice:
        return ThreadChoice(**given, clock=lambda: self.now)


@pytest.fixture(autouse=True)
def many_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(MOST)
    yield
    torch.set_num_threads(before)


def idle(count: int, rows: int) -> float:
    return rows / count


def busy(count: int, rows: int) -> float:
    return rows * (1.0 if count == 1 else 10.0 * count)


def test_an_idle_machine_uses_all_and_tries_half_now_and_then() -> None:
    machine = Machine(idle)
    choice = machine.choice()
    for _ in range(10 * RETRY):
        machine.run(choice)
    assert machine.counts[:3] == [8, 4, 8] and set(machine.counts) == {8, 4}
    assert machine.counts.count(4) <= 1 + 10 * RETRY / (2 * RETRY)


def test_a_busy_machine_goes_down_to_one_and_stays_there() -> None:
    machine = Machine(busy)
    choice = machine.choice()
    for _ in range(200):
        machine.run(choice)
    assert machine.counts[:4] == [8, 4, 2, 1] and machine.counts[4:].count(1) >= 193
    lost = sum(busy(count, 1) - 1 for count in machine.counts[4:])
    assert lost <= 0.03 * machine.now


def test_it_follows_when_the_machine_changes() -> None:
    machine = Machine(busy)
    choice = machine.choice(first=1)
    for _ in range(50):
        machine.run(choice)
    machine.seconds = idle
    for _ in range(50 * RETRY):
        machine.run(choice)
    assert machine.counts[-1] == 8
    machine.seconds = busy
    for _ in range(20):
        machine.run(choice)
    assert machine.counts[-1] == 1


def test_another_size_starts_from_what_is_known_of_the_nearest() -> None:
    machine = Machine(busy)
    choice = machine.choice(first=1)
    for _ in range(5):
        machine.run(choice)
    assert machine.counts == [1, 2, 1, 1, 1], "one is started with, and twice as many tried once"
    assert [machine.run(choice, rows=512) for _ in range(3)] == [1, 1, 1]


def test_a_number_that_was_asked_for_is_taken() -> None:
    machine = Machine(idle)
    assert {machine.run(machine.choice(fixed=3)) for _ in range(5)} == {3}


def test_an_error_leaves_the_number_as_it_was() -> None:
    choice = ThreadChoice(first=1)
    with pytest.raises(ZeroDivisionError), choice.for_step(1):
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == MOST


def test_engines_run_their_steps_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    torch.set_num_threads(2)
    for settings, expected in (({"threads": 1}, {1}), ({"deterministic": True}, {2}), ({}, {1, 2})):
        engine = make_engine(**settings)
        run = engine.step_runner.run
        monkeypatch.setattr(engine.step_runner, "run", lambda step, run=run: seen.append(torch.get_num_threads()) or run(step))
        request = engine.add_request([4, 5, 6])
        run_all(engine)
        assert request.output_token_ids == oracle([4, 5, 6], len(request.output_token_ids))
        assert set(seen) == expected and torch.get_num_threads() == 2
        seen.clear()


def test_a_small_model_is_traced_and_checked_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(4, 4)
    assert thread_choice.num_threads_to_start(model) == 1
    monkeypatch.setattr(thread_choice, "SMALL", 20)
    assert thread_choice.num_threads_to_start(model) == MOST
