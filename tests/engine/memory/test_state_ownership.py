"""Who owns which state slot, under any order of events; and that a state found in the prefix cache is that of its prefix."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_attn.attn_ops.kv.state_pool import StatePool
from paged_attn.attn_ops.specs.recurrent import RecurrentSpec, StateSpec
from paged_attn.engine.memory import state_snapshots
from paged_attn.engine.memory.budget import StateSlots
from paged_attn.engine.memory.kv_manager import KVManager
from paged_attn.engine.memory.radix_node import RadixNode
from paged_attn.engine.requests.request import Request
from tests.engine.memory.radix_invariants import check_invariants
from tests.engine.models import request_of

LAYERS = [RecurrentSpec("layer", (StateSpec("sum", (1,), torch.int64),))]


def state_of(tokens: list[int], namespace: Any) -> int:
    """A recurrent state that tells one prefix from another."""
    state = 1 if namespace is None else 2
    for token in tokens:
        state = state * 3 + token
    return state


class StateOwnership(RuleBasedStateMachine):
    """Random requests on a model whose state is a number made from all tokens so far; freed slots hold -1."""

    @initialize(
        slots=st.integers(2, 9), snapshots=st.integers(1, 9), reserved=st.integers(0, 3),
        page_size=st.sampled_from([1, 2]), min_fork=st.sampled_from([1, 2, 16]),
        interval=st.sampled_from([0, 1, 3]), share=st.sampled_from([1, 2, 8]),
    )  # fmt: skip
    def start(self, slots: int, snapshots: int, reserved: int, page_size: int, min_fork: int, interval: int, share: int) -> None:
        self.most = min(snapshots, slots)
        state_slots = StateSlots(1 + slots, self.most, min(reserved, self.most, slots - 1))
        self.pool, self.page_size = StatePool(LAYERS, state_slots.total), page_size
        self.values = self.pool.states(0)[0][:, 0]
        self.values.fill_(-1)
        self.before = state_snapshots.MIN_FORK, state_snapshots.SHARE
        state_snapshots.MIN_FORK, state_snapshots.SHARE = min_fork, share
        self.kv = KVManager(14, page_size, True, state_slots, self.pool, interval)
        self.requests: list[Request] = []
        self.kv.states.allocator.free = self.poisoning(self.kv.states.allocator.free)

    def poisoning(self, free: Any) -> Any:
        def poisoned(slot: int) -> None:
            free(slot)
            self.values[slot] = -1

        return poisoned

    def pick(self, data: st.DataObject) -> Request:
        return self.requests[data.draw(st.integers(0, len(self.requests) - 1))]

    @precondition(lambda self: self.kv.states.can_admit)
    @rule(tokens=st.lists(st.integers(1, 2), min_size=1, max_size=12), namespace=st.sampled_from([None, "a"]), fits=st.booleans())
    def admit(self, tokens: list[int], namespace: Any, fits: bool) -> None:
        request = request_of(tokens, namespace)
        expected = self.kv.cached_tokens(request)
        self.kv.adopt_prefix(request)
        assert request.num_cached == expected < len(tokens) and request.num_cached % self.page_size == 0
        if not fits:
            self.kv.release(request, share=False)
            return
        self.kv.states.take_slot(request)
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 9), outcome=st.sampled_from(["finite", "finite", "NaN", "raises"]))
    def step(self, data: st.DataObject, count: int, outcome: str) -> None:
        request = self.pick(data)
        start, count = request.num_cached, min(count, len(request.tokens) - request.num_cached)
        end = start + count
        if not self.kv.reserve(request, end):
            return
        checkpoints = self.kv.states.take_checkpoints([request], [count]).get(0, [])
        self.values[request.state_slot] = state_of(request.tokens[:end], request.namespace)
        if outcome == "raises":
            for kept in checkpoints:
                self.values[kept.slot] = -1
            if start or request.snapshots:
                request.num_validated = 0
                self.release(request, share=bool(request.num_sampled))
            return
        for kept in checkpoints:
            assert 0 < kept.tokens < count
            self.values[kept.slot] = state_of(request.tokens[: start + kept.tokens], request.namespace)
        request.num_cached = end
        self.kv.states.keep([request])
        if end < len(request.tokens):
            return
        if outcome == "NaN":
            self.release(request, share=False)
            return
        request.num_validated = end
        self.kv.share(request)
        assert not request.snapshots and not request.snapshot_points and not request.taken_slots
        request.tokens.append(data.draw(st.integers(1, 2)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), again=st.booleans())
    def finish(self, data: st.DataObject, again: bool) -> None:
        request = self.pick(data)
        done, tokens, vouched = request.num_cached, request.tokens[: request.num_cached], request.num_validated
        self.release(request, share=bool(request.num_sampled))
        if again:
            self.kv.release(request, share=True)
        if request.num_sampled and vouched == done and done % self.page_size == 0:
            node = self.kv.tree.match(tokens, request.namespace).node
            held_by_others = sum(len(r.snapshots) + len(r.taken_slots) for r in self.requests)
            shared = sum(kept.payload is not None and kept.lock_count > 0 for kept, _ in self.nodes())
            assert node.payload is not None or held_by_others + shared >= self.most

    def release(self, request: Request, share: bool) -> None:
        self.kv.release(request, share=share)
        self.requests.remove(request)
        assert (request.state_slot, request.num_validated, request.snapshot_points, request.snapshots) == (0, 0, [], {})
        assert not request.taken_slots and not request.spare_points

    @invariant()
    def every_state_is_that_of_its_tokens(self) -> None:
        for request in self.requests:
            if request.num_cached:
                assert self.values[request.state_slot] == state_of(request.tokens[: request.num_cached], request.namespace)
            for point, slot in request.snapshots.items():
                assert self.values[slot] == state_of(request.tokens[:point], request.namespace)
        for node, tokens in self.nodes():
            if node.payload is not None:
                assert self.values[node.payload] == state_of(tokens, node.namespace)

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        check_invariants(self.kv.tree)
        pending = [slot for request in self.requests for slot in (*request.snapshots.values(), *request.taken_slots.values())]
        attached = [node.payload for node, _ in self.nodes() if node.payload is not None]
        assert len(set(pending)) == len(pending) and set(pending) == self.kv.states.snapshots.taken
        owned = [*pending, *attached, *(request.state_slot for request in self.requests)]
        assert len(set(owned)) == len(owned) and set(owned) == self.kv.states.allocator._held
        assert len(pending) + len(attached) <= self.most
        assert sorted(attached) == sorted([*self.kv.states.snapshots._spare, *self.kv.states.snapshots._used])
        assert len(attached) == self.kv.states.snapshots.num_attached
        assert all(0 < slot < self.pool.num_slots for slot in owned)
        assert self.requests or self.kv.states.can_admit, "somebody can always run"

    def nodes(self) -> list[tuple[RadixNode, list[int]]]:
        found = [(root, []) for root in self.kv.tree._roots.values()]
        for node, tokens in found:
            found += [(child, tokens + child.tokens) for child in node.children.values()]
        return found

    def teardown(self) -> None:
        state_snapshots.MIN_FORK, state_snapshots.SHARE = self.before
        for request in self.requests:
            self.kv.release(request, share=False)
        self.kv.tree.clear()
        assert self.kv.allocator.num_free == self.kv.num_usable
        assert self.kv.states.snapshots.num_attached == 0 and not self.kv.states.allocator._held and not self.kv.states.snapshots.taken


TestStateOwnership = StateOwnership.TestCase
TestStateOwnership.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
