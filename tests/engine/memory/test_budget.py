"""How one budget is divided over pages and recurrent states, and what that is worth to requests."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paged_attn import SamplingParams, UnsupportedError, explain
from paged_attn.attn_ops.kv.layer_groups import group_layers
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.recurrent import RecurrentSpec, StateSpec
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.engine import Engine
from paged_attn.engine.memory.budget import NO_STATE, MemoryBudget, StateSlots
from paged_attn.report.inspection import memory_lines
from tests.engine.models import assert_idle, make_engine, oracle, run_all
from tests.engine.test_recurrent import poison_freed_slots
from tests.oracle import random_prompts
from tests.recurrent_models import recurrent

CPU, F32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
GIB = 2**30


def attention(count: int, heads: int = 1, dim: int = 8, **more: Any) -> list[AttentionSpec]:
    return [AttentionSpec(heads, heads, dim, dim, 1.0, kv_layer=index, **more) for index in range(count)]


def states(nbytes: int) -> list[RecurrentSpec]:
    return [RecurrentSpec("mixer", (StateSpec("state", (nbytes // 4,), F32),))]


def divided(memory: float, slot: int, token: int = 64, longest: int | None = None, **settings: Any) -> MemoryBudget:
    """`memory` bytes, for states of `slot` bytes and KV of `token` bytes each, in pages of one token."""
    config = EngineConfig(**{"page_size": 1, "kv_memory_gib": memory / GIB, "max_requests": 1000, **settings})
    return MemoryBudget(config, attention(1, 1, token // 8), F32, CPU, recurrent=states(slot), longest=longest)


@given(st.integers(1, 200), st.sampled_from([8, 64, 512]), st.integers(1, 5000), st.integers(30, 2000))
def test_whatever_length_requests_have_half_as_many_run_as_with_a_division_made_for_it(
    slot: int, token: int, longest: int, requests: int
) -> None:
    """And none of the memory is in pages that these slots cannot fill, or in slots for which there is no page."""
    slot *= 64
    memory = requests * (slot + token * longest) // 4
    budget = divided(memory, slot, token, longest)
    pages, running = budget.pages(), budget.slots.most_running
    assert budget.slots.total * slot + pages * token <= memory
    assert running <= pages - 1 <= running * longest
    for tokens in {1, longest, *(longest * part // 7 for part in range(1, 7))} - {0}:
        ideal = (memory - slot - token) // (slot + tokens * token)
        assert min(running, (pages - 1) // tokens) >= min(ideal, 1000) // 2 - 1


@given(st.integers(1, 100), st.sampled_from([16, 64]), st.integers(1, 300), st.integers(4, 300))
def test_the_longest_request_fits_where_half_of_the_memory_holds_it(slot: int, token: int, longest: int, times: int) -> None:
    slot *= 64
    memory = times * slot
    budget = divided(memory, slot, token, longest)
    assert budget.pages() - 1 >= min(longest, memory // 2 // token - 1)


# Of published shapes in bfloat16: bytes of a state, attention layers, KV heads, head dim, positions.
QWEN3_NEXT = (36 * (32 * 128 * 128 * 4 + 8192 * 4 * 2), 12, 2, 256, 262_144)
NEMOTRON_H_8B = (24 * (128 * 64 * 128 * 2 + (8192 + 2 * 8 * 128) * 4 * 2), 4, 8, 128, 8_192)
LFM2_1B = (10 * 2048 * 3 * 2, 6, 8, 64, 128_000)


@pytest.mark.parametrize(
    ("shape", "gib", "before", "after"),
    [
        (QWEN3_NEXT, 40.0, (206, 876_400), (275, 873_232)),
        (NEMOTRON_H_8B, 20.0, (153, 656_336), (237, 551_008)),
        (LFM2_1B, 10.0, (1024, 853_296), (1024, 853_296)),
    ],
    ids=["Qwen3-Next", "Nemotron-H-8B", "LFM2-1.2B"],
)
def test_published_hybrids(shape: tuple[int, ...], gib: float, before: tuple[int, int], after: tuple[int, int]) -> None:
    """Requests that may run at the same time, and tokens that the pages hold: when half of the memory was for states, a quarter of their
    slots for kept ones alone, and now."""
    each, count, heads, dim, longest = shape
    config = EngineConfig(kv_memory_gib=gib, max_requests=1024)
    fit, page = int(gib * GIB / 2 // each) - 1, count * heads * dim * 2 * 2 * 16
    kept = min(1024, fit // 4)
    running = min(1024, fit - kept)
    assert (running, (int((gib * GIB - (running + 1 + kept) * each) // page) - 1) * 16) == before
    budget = MemoryBudget(config, attention(count, heads, dim), BF16, CPU, recurrent=states(each), longest=longest)
    assert (min(1024, budget.slots.most_running), (budget.pages() - 1) * 16) == after


def test_a_model_without_attention_has_all_of_it_for_states() -> None:
    config = EngineConfig(kv_memory_gib=100 * 4096 / GIB)
    budget = MemoryBudget(config, [], F32, CPU, recurrent=states(4096), longest=512)
    assert budget.slots == StateSlots(100, 99, 6) and budget.pages() == 1 + (1 << 20) // 16
    assert budget.describe(budget.pages()) == "0.4 MiB: 100 slots of state, 0.00 MiB each (0.4 MiB), up to 99 of them for kept prefixes"


@pytest.mark.parametrize("num_pages", [None, 7, 1000])
@pytest.mark.parametrize("windows", [False, True])
def test_a_model_without_states_has_all_of_it_for_pages(num_pages: int | None, windows: bool) -> None:
    """To the page as before, however short its requests are."""
    layers = [*attention(1), *[AttentionSpec(1, 1, 8, 8, 1.0, sliding_window=8, kv_layer=1 + i) for i in range(2)]][: 3 if windows else 1]
    groups = group_layers(layers, 512, 16)
    assert len(groups) == (3 if windows else 0)
    page = 8 * 2 * 4 * 16
    config = EngineConfig(kv_memory_gib=1.0, num_pages=num_pages, max_requests=1)
    budget = MemoryBudget(config, layers, F32, CPU, groups, longest=512)
    assert budget.slots == NO_STATE
    assert budget.pages() == (GIB // page if num_pages is None else num_pages * len(layers))


def test_settings_bound_requests_and_kept_states() -> None:
    """32 slots would take all; every page is 256 bytes, and a request of one token takes one."""
    memory, slot, token = 32 * 4096, 4096, 256
    assert divided(memory, slot, token).slots == StateSlots(15, 14, 0), "no limit of length: each slot has as much for pages"
    assert divided(memory, slot, token, max_requests=2, state_snapshots=3).slots == StateSlots(6, 3, 0)
    assert divided(memory, slot, token, prefix_cache=False).slots == StateSlots(15, 0, 0)
    assert divided(memory, slot, token, longest=1).slots == StateSlots(30, 29, 1)
    assert divided(memory, slot, token, longest=1, max_requests=2, state_snapshots=2).pages() == 1 + 4, "more could not be filled"
    assert divided(memory, slot, token, longest=1, max_requests=2).slots.kept == 29, "what nothing else needs"
    given = divided(memory, slot, token, num_pages=17)
    assert given.slots.total == 32 - 17 * 256 // 4096 - 1 and given.pages() == 17
    assert divided(memory, slot, token, num_pages=10_000).slots.total == 16, "pages that were asked for leave states half of it at least"
    asked = {"page_size": 1, "kv_memory_gib": memory / GIB, "max_requests": 1000}
    for wanted, kept in ((None, 0), (4, 4)):
        config = EngineConfig(**asked, state_snapshots=wanted)
        assert MemoryBudget(config, attention(1), F32, CPU, recurrent=states(slot), chunks=False).slots.kept == kept


def test_too_little_memory_is_refused_with_the_sum() -> None:
    assert divided(2 * 4096 + 2 * 256, 4096, 256).slots.total == 2
    with pytest.raises(UnsupportedError, match=r"holds 1 slots of 0.00 MiB, beside 2 pages of 0.00 MiB; at least 2 are needed"):
        divided(2 * 4096 + 511, 4096, 256)
    with pytest.raises(UnsupportedError, match=r"holds 1 slots of 0.00 MiB; at least 2 are needed\. Raise kv_memory_gib"):
        divided(2 * 4096 + 2000, 4096, 256, num_pages=9)


def test_on_a_gpu_states_that_lie_there_already_count_once() -> None:
    """80 % of what was free before them is for both."""
    free, cuda = 100 << 20, torch.device("cuda")
    config, slot = EngineConfig(max_requests=100), 1 << 18
    with mock.patch.object(torch.cuda, "mem_get_info", lambda device: (free, free)):
        budget = MemoryBudget(config, attention(1), F32, cuda, recurrent=states(slot))
        free -= budget.state_bytes
        pages = budget.pages()
        fewer = budget.pages(kept_free=10 << 20)
    assert budget.slots.total == 159 and budget.state_bytes + pages * 1024 == 80 << 20
    assert budget.state_bytes + fewer * 1024 == 72 << 20


def test_ranks_have_as_many_slots_as_the_one_that_has_least() -> None:
    config = EngineConfig(kv_memory_gib=100 * 4096 / GIB)
    budget = MemoryBudget(config, [], F32, CPU, recurrent=states(4096), agree=lambda total: min(total, 40))
    assert budget.slots == StateSlots(40, 39, 2)
    with pytest.raises(UnsupportedError, match="at least 2 are needed"):
        MemoryBudget(config, [], F32, CPU, recurrent=states(4096), agree=lambda total: 1)


def most_running(engine: Engine) -> int:
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    return most


def engine_of(name: str, slots: int, **settings: Any) -> Engine:
    """An engine with memory for so many states if there were no pages."""
    each = sum(layer.spec.nbytes for layer in make_engine(recurrent(name)).runner.recurrent)
    engine = make_engine(recurrent(name), **{"num_pages": None, "kv_memory_gib": slots * each / GIB, "page_size": 16, **settings})
    assert engine.state_pool is not None and engine.state_pool.nbytes + engine.pool.nbytes <= slots * each
    poison_freed_slots(engine)
    engine.pool.storage.fill_(float("nan"))
    return engine


@pytest.mark.parametrize(("name", "before", "after"), [("falcon_h1", 7, 9), ("qwen3_next", 9, 11), ("mamba2", 15, 37)])
def test_more_requests_run_at_once_in_the_same_memory(name: str, before: int, after: int) -> None:
    """64 requests of 60 tokens and 40 new ones, in memory of 40 states; `before` was measured when states had half of it, and kept states a
    quarter of these. All but the first few are preempted on the way, and each says what the model says."""
    engine = engine_of(name, 40, max_batch_tokens=256)
    prompts = random_prompts((60,) * 64, seed=3)
    requests = [engine.add_request(prompt, SamplingParams(max_new_tokens=40)) for prompt in prompts]
    assert most_running(engine) == after > before
    assert (engine.scheduler.stats.preemptions > 10) == bool(engine.pool.nbytes)
    for request, prompt in list(zip(requests, prompts, strict=True))[::7]:
        assert request.output_token_ids == oracle(prompt, 40, recurrent(name))
    assert_idle(engine)


def lfm2_engine(slots: int, **settings: Any) -> Engine:
    """An engine with so many slots of state, and pages enough."""
    given = {"num_pages": 2000, "page_size": 4, "kv_memory_gib": 2 * slots * 768 / GIB, "max_batch_tokens": 3000, **settings}
    engine = make_engine(recurrent("lfm2"), **given)
    assert engine.budget.slots == StateSlots(slots, slots - 1, (slots - 1) // 16)
    poison_freed_slots(engine)
    return engine


@pytest.mark.parametrize("overlap", [False, True])
def test_kept_states_have_what_is_free_and_give_way(overlap: bool) -> None:
    """Twelve slots. Prompts leave states in all but the one that the last of them ran in; then twelve requests run."""
    engine = lfm2_engine(13, overlap=overlap, snapshot_interval=8)
    prompts = random_prompts((21,) * 12, seed=2)
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_new_tokens=2))
        run_all(engine)
    assert engine.kv.states.num_snapshots == 11 and engine.kv.states.num_in_use == 0
    asked = [[*prompt, 7] for prompt in prompts[::-1]]
    requests = [engine.add_request(prompt, SamplingParams(max_new_tokens=6)) for prompt in asked]
    assert most_running(engine) == 12
    assert [request.output_token_ids for request in requests] == [oracle(prompt, 6, recurrent("lfm2")) for prompt in asked]
    assert [request.cached_tokens for request in requests[:4]] == [20] * 4, "the last used of what is kept gives way last"
    assert_idle(engine)


def test_who_finds_no_slot_but_that_of_its_own_beginning_runs_in_it() -> None:
    engine = lfm2_engine(3)
    stem, tail = random_prompts((40, 5), seed=4)
    engine.add_request(stem, SamplingParams(max_new_tokens=2))
    run_all(engine)
    first = engine.add_request(stem[:4], SamplingParams(max_new_tokens=40))
    engine.step()
    assert (engine.kv.states.num_snapshots, engine.kv.states.num_in_use) == (1, 1) and engine.kv.states.can_admit
    second = engine.add_request(stem + tail, SamplingParams(max_new_tokens=4))
    engine.step()
    assert (engine.kv.states.num_snapshots, engine.kv.states.num_in_use, second.cached_tokens) == (
        0,
        2,
        36,
    ) and not engine.kv.states.can_admit
    assert memory_lines(engine)[1].split() == "2 states of requests, 0 of kept prefixes, 0 slots free now".split()
    run_all(engine)
    assert second.output_token_ids == oracle(stem + tail, 4, recurrent("lfm2"))
    assert first.output_token_ids == oracle(stem[:4], 40, recurrent("lfm2"))
    assert_idle(engine)


def test_the_log_and_explain_say_how_memory_was_divided(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "paged_attn"):
        engine = make_engine(recurrent("falcon_h1"), num_pages=None, kv_memory_gib=16 / 1024, page_size=16)
    division = engine.budget.describe(engine.pool.num_pages)
    assert engine.state_pool is not None
    slots, pages, mib = engine.state_pool.num_slots, engine.pool.num_pages, 2**20
    assert 15.9 < (engine.state_pool.nbytes + engine.pool.nbytes) / mib <= 16
    assert division == (
        f"16.0 MiB: {slots} slots of state, 0.01 MiB each ({engine.state_pool.nbytes / mib:.1f} MiB), "
        f"up to {slots - 1} of them for kept prefixes; "
        f"{pages} pages of 16 tokens, {engine.pool.nbytes / pages / mib:.3f} MiB each ({engine.pool.nbytes / mib:.1f} MiB)"
    )
    assert [record.message for record in caplog.records].count(f"memory: {division}") == 1
    lines = explain(engine).splitlines()
    at = lines.index(f"  memory       {division}")
    assert lines[at + 1].strip() == f"0 states of requests, 0 of kept prefixes, {slots - 1} slots free now"


def test_a_sixteenth_of_the_slots_stays_with_the_prefix_cache() -> None:
    """So that a beginning that all have is found while others wait for slots."""
    engine = lfm2_engine(33)
    stem, *tails = random_prompts((40, *(5,) * 96), seed=2)
    engine.add_request(stem, SamplingParams(max_new_tokens=1))
    run_all(engine)
    requests = [engine.add_request(stem + tail, SamplingParams(max_new_tokens=4)) for tail in tails]
    assert most_running(engine) == 32 - 2
    assert min(request.cached_tokens for request in requests) >= 36
    assert [request.output_token_ids for request in requests[::9]] == [oracle(stem + tail, 4, recurrent("lfm2")) for tail in tails[::9]]
    assert_idle(engine)
