"""The scheduler under everything that can happen to it: soundness of what is shared, owners, budgets, progress, determinism."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.scheduling.grouped_world import GroupedWorld
from tests.engine.scheduling.world import POISON, World


def simulate(seed: int, overlap: bool, snapshots: int | None, troubles: bool, make: type[World] = World, **config: Any) -> World:
    """Floods and lulls of requests with shared prefixes until all have ended."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4])
    num_pages = rng.randint(6, 24)
    world = make(rng, num_pages, page_size, overlap=overlap, snapshots=snapshots, **config)
    room = min(world.kv.max_request_pages, 2 * num_pages) * page_size
    stems = [[rng.choice([1, 2]) for _ in range(room)] for _ in range(2)]
    left, steps = 14, 0
    while left or world.requests:
        for _ in range(min(left, rng.choice([0, 0, 1, 5]) if world.requests else 3)):
            length = rng.randint(1, room)
            tokens = rng.choice(stems)[: rng.randint(0, length)]
            tokens += [rng.choice([1, 2]) for _ in range(rng.randint(0, max(length - len(tokens), 0)))] or [1]
            if troubles and rng.random() < 0.1:
                tokens[rng.randrange(len(tokens))] = POISON
            tokens = tokens[:room]
            world.add(tokens, rng.randint(1, room - len(tokens) + 1), rng.choice([None, "a"]), rng.choice([0, 0, 1]))
            left -= 1
        if troubles and world.requests and rng.random() < 0.1:
            world.cancel(rng.choice(list(world.requests.values())))
        world.step(fails=troubles and rng.random() < 0.1)
        steps += 1
        assert steps < 5000, "no progress"
    world.check_empty()
    return world


ANYTHING = {
    "seed": st.integers(0, 10**6), "overlap": st.booleans(), "troubles": st.booleans(), "max_batch_tokens": st.integers(1, 20),
    "max_requests": st.integers(1, 6), "prefix_wait_tokens": st.sampled_from([0, 1, 2, 5]), "policy": st.sampled_from(["fcfs", "lpm"]),
}  # fmt: skip
WITH_STATES = {
    "snapshots": st.sampled_from([0, 1, 2, 4, 16, 40]), "slots": st.sampled_from([None, 1, 2, 3, 5]),
    "snapshot_interval": st.sampled_from([0, 1, 3, 1024]),
}  # fmt: skip


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(prefix_cache=st.booleans(), **ANYTHING)
def test_everything_is_sound_and_comes_to_its_end(**drawn: Any) -> None:
    simulate(snapshots=None, **drawn)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(**WITH_STATES, **ANYTHING)
def test_so_it_does_with_recurrent_states(**drawn: Any) -> None:
    simulate(**drawn)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(prefix_cache=st.booleans(), snapshots=st.sampled_from([None, None, 4]), slots=st.sampled_from([None, 2]), **ANYTHING)
def test_so_it_does_with_windows(**drawn: Any) -> None:
    simulate(make=GroupedWorld, **drawn)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(snapshots=st.sampled_from([None, 3]), **ANYTHING)
def test_equal_calls_give_equal_steps(**drawn: Any) -> None:
    assert simulate(**drawn).trace == simulate(**drawn).trace
