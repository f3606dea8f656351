"""The Triton backend's latent attention in Triton's interpreter against the model's own formula; tests/gpu has the real thing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.backends.attention.latent import step
from paged_attn.backends.attention.reference import ReferenceBackend
from tests.backends.latent_problems import LAYER, PUBLISHED, SPECS, STEPS, Case, make, spec_of

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU")
if not torch.cuda.is_available():
    from paged_attn.backends.attention.triton.backend import TritonBackend
    from paged_attn.backends.attention.triton.tiling import tiling
    from paged_attn.backends.kv_write.launch import store_latent_rows
    from paged_attn.backends.machine import Machine, power_of_2

    TRITON, DETERMINISTIC = TritonBackend(), TritonBackend(deterministic=True)
MACHINE = "paged_attn.backends.attention.triton.plan.machine_of"


@pytest.fixture(autouse=True)
def absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "expands", lambda *_: False)


@pytest.mark.parametrize("lengths", STEPS)
@pytest.mark.parametrize("kind", SPECS)
def test_every_kind_in_every_step(kind: str, lengths: str) -> None:
    make(kind, STEPS[lengths], 4).assert_right(TRITON)


@pytest.mark.parametrize(("kind", "lengths"), zip(SPECS, ("mixed", "chunks", "decode"), strict=True))
def test_queries_that_the_model_maps_itself(kind: str, lengths: str) -> None:
    make(kind, STEPS[lengths], 4).assert_right_with_maps_of_the_model(TRITON)


@pytest.mark.parametrize("lengths", STEPS)
def test_deterministic_cuts_give_the_same_numbers(lengths: str) -> None:
    make("rotated first", STEPS[lengths], 4).assert_right(DETERMINISTIC)


@pytest.mark.parametrize(("kind", "lengths"), zip(SPECS, ("prompts", "chunks", "mixed"), strict=True))
def test_what_is_expanded_comes_to_the_kernel(monkeypatch: pytest.MonkeyPatch, kind: str, lengths: str) -> None:
    """As on a GPU of compute capability 9.0, with the general kernel in place of the one for it."""
    monkeypatch.setattr(step, "expands", lambda spec, new, cached: new > 1)
    monkeypatch.setattr(TRITON, "attends_expanded", lambda spec, dtype, device: True)
    for way in ("attend_expanded", "FreshPrompts"):
        monkeypatch.setattr(step, way, lambda *_: pytest.fail("not by the kernel"))
    make(kind, STEPS[lengths], 4).assert_right(TRITON)


def test_the_kernel_for_hopper_takes_published_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    found = {kind: spec_of(kind, 16, PUBLISHED).expanded for kind in PUBLISHED}
    assert not any(TRITON.attends_expanded(spec, torch.bfloat16, device) for spec in found.values()), "there is no such GPU"
    monkeypatch.setattr(TRITON, "_machine_of", lambda device: Machine(132, hopper=True, early=True))
    taken = {kind for kind, spec in found.items() if TRITON.attends_expanded(spec, torch.bfloat16, device)}
    assert taken == {"512 + 64", "256 + 32", "256 + 64", "128 + 32"}
    assert not TRITON.attends_expanded(found["512 + 64"], torch.float32, device)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_page_sizes(page_size: int) -> None:
    make("512 + 64", ((70, 1), (64, 3), (63, 1)), page_size).assert_right(TRITON)


@pytest.mark.parametrize("lengths", [((40, 1), (3, 1)), ((20, 3), (17, 1))], ids=["decode", "mixed"])
@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_sizes(kind: str, lengths: tuple[tuple[int, int], ...]) -> None:
    make(spec_of(kind, 16, PUBLISHED), lengths, 16).assert_right(TRITON)


@pytest.mark.parametrize("heads", [1, 20, 40, 128])
def test_heads(heads: int) -> None:
    """More than a tile has, and counts that fill none."""
    make(spec_of("512 + 64", heads), ((40, 1), (5, 3)), 16).assert_right(TRITON)


@pytest.mark.parametrize("lengths", STEPS)
def test_16_bit_type(lengths: str) -> None:  # the interpreter multiplies bfloat16 as if it were integers: tests/gpu has that type
    make("512 + 64", STEPS[lengths], 4, torch.float16).assert_right(TRITON, 4e-3)


@pytest.mark.parametrize("lengths", [((400, 1),), ((390, 1), (3, 1)), ((70, 2), (50, 2), (5, 1))])
def test_items_cut_into_many_parts(monkeypatch: pytest.MonkeyPatch, lengths: tuple[tuple[int, int], ...]) -> None:
    """17 multiprocessors: every program has a block or two, so that a merge has dozens of parts and more than one round."""
    monkeypatch.setattr(MACHINE, lambda device: Machine(17, hopper=False, early=False))
    make("512 + 64", lengths, 16).assert_right(TRITON)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("lengths", ["decode", "mixed"])
def test_log_sum_exps_and_strided_operands(lengths: str, deterministic: bool) -> None:
    """What the backend is given of a latent layer: rows as keys, their first part as values."""
    case = make("rotated first", STEPS[lengths], 4)
    (expected, theirs), (output, lse) = attend(case, ReferenceBackend()), attend(case, DETERMINISTIC if deterministic else TRITON)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, theirs, atol=1e-5, rtol=1e-5)
    assert not output[case.batch.num_tokens :].any() and not lse[case.batch.num_tokens :].any()


def attend(case: Case, backend: object) -> tuple[Tensor, Tensor]:
    """Output [rows, heads, rank] and log-sum-exps for random queries that lie apart, and an output whose elements do."""
    spec, rows = case.spec, case.batch.num_rows
    draw = torch.Generator().manual_seed(3)
    query = torch.randn(rows, spec.qk_head_dim, spec.num_q_heads, generator=draw).transpose(1, 2)
    output, lse = torch.full((rows, spec.num_q_heads, 2 * spec.rank), float("nan"))[..., ::2], torch.full((rows, spec.num_q_heads), 1.0)
    plan = backend.plan(case.batch, case.pool)
    backend.plan_in_graph(plan)
    key = case.rows[:, None]
    backend.forward(plan, LAYER, spec, query, key, key[..., : spec.rank], output, save_kv_cache=True, lse_out=lse)
    return output, lse


@pytest.mark.usefixtures("exact_products")
def test_a_row_is_bitwise_the_same_in_any_batch_and_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts are cut at the same tokens (here every 64), whatever stands beside it."""
    monkeypatch.setattr("paged_attn.backends.attention.triton.plan.tiling", lambda *given: replace(tiling(*given), part_blocks=4))
    whole = make("rotated first", ((0, 150),), 16, padding=0)
    query = torch.randn(150, 4, whole.spec.qk_head_dim, generator=torch.Generator().manual_seed(5))

    def last_row(*lengths: tuple[int, int]) -> Tensor:
        """The last request is the row's, and its cached rows are those of `whole`."""
        cached, new = lengths[-1]
        case = make("rotated first", lengths, 16, padding=0)
        count = case.batch.num_tokens
        case.rows[count - new : count] = whole.rows[cached : cached + new]
        table = case.batch.page_table[len(lengths) - 1]
        for position in range(cached):
            case.pool.key(LAYER)[table[position // 16], position % 16, 0] = whole.rows[position]
        mine = torch.randn(case.batch.num_rows, 4, whole.spec.qk_head_dim)
        mine[count - new : count] = query[cached : cached + new]
        output, plan = torch.empty(case.batch.num_rows, 4, whole.spec.rank), DETERMINISTIC.plan(case.batch, case.pool)
        DETERMINISTIC.plan_in_graph(plan)
        key = case.rows[:, None]
        DETERMINISTIC.forward(plan, LAYER, case.spec, mine, key, key[..., : case.spec.rank], output, save_kv_cache=True)
        return output[count - 1]

    expected = last_row((149, 1))
    assert torch.equal(last_row(*((70, 1),) * 9, (149, 1)), expected), "a merge of many items"
    assert torch.equal(last_row((7, 1), (20, 3), (149, 1)), expected) and torch.equal(last_row((142, 8)), expected)


def test_lengths_are_read_on_the_device() -> None:
    """As in a captured graph, which was planned at the longest context, and which a page table of full width comes with."""
    case = make("512 + 64", STEPS["decode"], 4)
    table = torch.cat([case.batch.page_table, torch.full((4, 30), case.pool.num_pages - 1, dtype=torch.int32)], 1)
    case.batch = replace(case.batch, seq_lens_host=(148,) * 4, page_table=table, page_table_host=None)
    case.assert_right(TRITON)
    assert TRITON.graph_lengths(4, 148, case.pool) == (148,)


def test_a_large_batch_needs_no_larger_workspace() -> None:
    few, many = (make("512 + 64", ((40, 1),) * count, 16) for count in (16, 64))
    sizes = [TRITON.plan(case.batch, case.pool).partial.numel() for case in (few, many)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("kind", PUBLISHED)
def test_tilings_fit_a_multiprocessor(kind: str) -> None:
    """The sums of all its programs take half of the registers at most; test_triton_compile looks at the rest."""
    for heads in (16, 20, 40, 64, 128):
        spec: LatentSpec = spec_of(kind, heads, PUBLISHED)
        for rows, dtype in (("one", torch.bfloat16), ("more", torch.bfloat16), ("all", torch.bfloat16), ("one", torch.float32)):
            tiles = tiling(rows, spec, dtype, 1 if rows == "one" else 8, 9000, 9000, Machine(132, hopper=False, early=True))
            assert tiles.block_m * power_of_2(spec.rank) * tiles.programs_per_sm <= 32768 and not tiles.hopper and not tiles.early


@pytest.mark.parametrize("with_queries", [True, False])
@pytest.mark.parametrize(("rank", "rotated"), [(32, 8), (24, 6), (16, 0)])
def test_the_kernel_that_stores_rows(rank: int, rotated: int, with_queries: bool) -> None:
    """Strided operands, padding that has no slot, a pool of another dtype: the same bytes as PyTorch's way writes."""
    heads, total, tokens = 20, 7, 5
    generator = torch.Generator().manual_seed(rank)
    both = torch.randn(total, 2 * (rank + rotated), generator=generator)[:, ::2]
    latent, shared = both[:, :rank], both[:, rank:] if rotated else None
    query = torch.randn(heads, total, rotated + 3, generator=generator).transpose(0, 1)[..., 3:]
    slots = torch.tensor([9, 3, 15, 0, 6, -1, -1])
    rows, expected = torch.full((2, 4, 4, 1, rank + rotated), 7.0, dtype=torch.float16)
    mapped, moved = torch.full((2, total, heads, rank + rotated), 7.0)
    store_latent_rows(latent, shared, rows, slots, tokens, (query, mapped) if with_queries else None)
    expected.view(16, -1)[slots[:tokens]] = both[:tokens].half()
    if with_queries:
        moved[..., rank:] = query
    assert rows.equal(expected) and mapped.equal(moved)
