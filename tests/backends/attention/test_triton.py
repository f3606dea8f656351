"""The Triton backend in Triton's interpreter against the float32 oracle: small shapes in many parts; tests/gpu has the real thing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_attn.attn_ops.batch.batch import ForwardMode
from paged_attn.backends.attention.reference import ReferenceBackend
from tests.backends.agreeing import agree as agree_with_oracle
from tests.backends.problems import FEATURES, LAYER, LAYOUTS, STRIDES, close, copy_of, make, new_output, run, spec_of

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU")
if not torch.cuda.is_available():
    from paged_attn.backends.attention.triton import tiling
    from paged_attn.backends.attention.triton.backend import TritonBackend
    from paged_attn.backends.attention.triton.tiling import Tiling
    from paged_attn.backends.machine import Machine

    TRITON, DETERMINISTIC, REFERENCE = TritonBackend(), TritonBackend(deterministic=True), ReferenceBackend()

CHOSEN = {"one": lambda new: new == 1, "more": lambda new: new > 1, "all": lambda new: True}
MODES = {
    ForwardMode.EXTEND: [(0, 7), (0, 1), (0, 18), (9, 4)],
    ForwardMode.DECODE: [(1, 1), (15, 1), (16, 1), (70, 1)],
    ForwardMode.MIXED: [(17, 1), (0, 1), (6, 5), (33, 1), (0, 9)],
}


def agree(case, backend, *, lse=True, save=True):
    agree_with_oracle(case, backend, lse=lse, save=save)


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_in_every_mode(feature, mode):
    case = make(MODES[mode], spec_of(feature), page_size=4, extra_rows=3)
    assert case.batch.mode is mode
    agree(case, TRITON)


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
@pytest.mark.parametrize("feature", ["plain", "all", "bidirectional_chunk", "gqa_7_sinks"])
def test_deterministic_cuts_give_the_same_numbers(feature, mode):
    agree(make(MODES[mode], spec_of(feature), page_size=4, extra_rows=3), DETERMINISTIC)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_layouts(layout, page_size):
    agree(make([(130, 1), (129, 3), (128, 1)], page_size=page_size, layout=layout), TRITON)


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
def test_16_bit_type(mode):  # the interpreter multiplies bfloat16 as if it were integers: tests/gpu has that type
    agree(make(MODES[mode], spec_of("softcap"), page_size=4, dtype=torch.float16, extra_rows=1), TRITON)


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.MIXED], ids=lambda m: m.value)
def test_strided_rows(mode, strides):
    agree(make(MODES[mode], page_size=4, strides=strides, extra_rows=2), TRITON)


@pytest.mark.parametrize("strides", STRIDES)
def test_strided_output(strides):
    from paged_attn.attn_ops.context import ForwardContext
    from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION

    case = make(MODES[ForwardMode.MIXED], page_size=4)
    expected, _ = run(copy_of(case), REFERENCE)
    output = new_output(case, strides)
    with ForwardContext(case.batch, case.pool, TRITON):
        UNIFIED_ATTENTION(case.query, case.key, case.value, output, LAYER, True)
    close(output, expected)


def test_strided_tables():
    """As columns of parameters that several layers share."""
    for feature in ("bias_by_key", "bias_by_distance", "sinks"):
        case = make([(40, 1), (17, 1), (0, 9)], spec_of(feature), page_size=4)
        if case.bias is not None:
            case.bias = case.bias.t().contiguous().t()
        if case.sinks is not None:
            case.sinks = torch.stack([case.sinks, torch.zeros_like(case.sinks)], 1)[:, 0]
        agree(case, TRITON)


@pytest.mark.parametrize("least", [float("-inf"), torch.finfo(torch.float32).min])
@pytest.mark.parametrize("lengths", [[(40, 5), (30, 1)], [(40, 1), (70, 1)]])
def test_biases_that_hide_all_keys_of_a_block(lengths, least):
    case = make(lengths, spec_of("bias_by_key"), page_size=4)
    case.bias[:, :20] = least
    agree(case, TRITON)


@pytest.mark.parametrize("feature", ["plain", "gqa_7", "all"])
def test_a_layer_that_reads_anothers_kv_stores_nothing(feature):
    case = make([(17, 1), (30, 1)], spec_of(feature), page_size=4)
    with_kv = copy_of(case)
    expected, _ = run(with_kv, REFERENCE)
    output, _ = run(with_kv, TRITON, save=False)
    close(output, expected)


@pytest.mark.parametrize("lengths", [[(400, 1)], [(390, 1), (3, 1)], [(300, 6), (200, 2), (5, 1)]])
def test_items_cut_into_many_parts(monkeypatch, lengths):
    """33 multiprocessors: every program has a block or two, so that a merge has dozens of parts and more than one round."""
    monkeypatch.setattr("paged_attn.backends.attention.triton.plan.machine_of", lambda device: Machine(33, hopper=False, early=False))
    agree(make(lengths, spec_of("sinks"), page_size=16), TRITON)


@pytest.mark.parametrize("feature", ["plain", "window", "gqa_7_sinks"])
@pytest.mark.parametrize("lengths", [[(100, 1)], [(90, 1), (1, 1), (40, 1)], [(60, 6), (50, 1), (5, 1)]])
def test_the_first_block_is_read_early(monkeypatch, lengths, feature):
    """Programs with a block, several, parts of two items, or nothing; in a mixed step, whose KV is stored just before, nothing is early."""
    chosen = lambda rows, *given: replace(tiling.tiling(rows, *given), stages=1, first_block_early=rows == "one")  # noqa: E731
    monkeypatch.setattr("paged_attn.backends.attention.triton.plan.tiling", chosen)
    for multiprocessors in (3, 33):
        machine = Machine(multiprocessors, hopper=False, early=False)
        monkeypatch.setattr("paged_attn.backends.attention.triton.plan.machine_of", lambda device, machine=machine: machine)
        agree(make(lengths, spec_of(feature), page_size=16), TRITON)


@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 256])
def test_head_dims_that_are_no_power_of_two(head_dim):
    agree(make([(20, 1), (7, 3)], spec_of(dim=head_dim), page_size=4), TRITON)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=6),
    st.sampled_from(["plain", "window", "chunk", "window_chunk", "bidirectional", "gqa_7", "successive", "inter"]),
    st.sampled_from([1, 2, 7]),
    st.booleans(),
    st.integers(0, 3),
)
def test_the_dealt_shares_cover_all_blocks_once(lengths, feature, multiprocessors, deterministic, item_cost):
    """Walk the programs' shares on the host and count the blocks of every (request, head, tile)."""
    from paged_attn.backends.attention.triton.plan import Plan
    from paged_attn.backends.attention.triton.work_partition import PartitionKind, WorkPartition, deal

    spec = replace(spec_of("chunk"), chunk_part=feature) if feature in ("successive", "inter") else spec_of(feature)
    case = make(lengths, spec, page_size=4)
    kinds_of_rows = ("all",) if deterministic else ("one", "more")
    for rows in kinds_of_rows:
        chosen = CHOSEN[rows]
        if not any(chosen(new) for _, new in lengths):
            continue
        tiles = Tiling(16, 16, 4, 2, 2, 2, part_blocks=2 if deterministic else 0, item_cost=item_cost)
        kind = PartitionKind.of(case.spec, rows, tiles)
        shares = WorkPartition.allocate(kind, case.batch, multiprocessors, case.batch.num_requests)
        deal([shares], [case.batch])
        assert not shares.counters[: 2 * shares.programs].any()
        covered = walk(shares, case, lengths)
        assert covered == expected_blocks(kind, lengths, chosen), (rows, covered)
    assert Plan.of(case.batch, case.pool, deterministic).by_layer


def blocks_of(kind, cached, new, tile):
    """How many key blocks a tile has, from the definition of what its rows see."""
    first = cached + tile * kind.tiling.block_m // kind.group
    last = cached + min(((tile + 1) * kind.tiling.block_m - 1) // kind.group, new - 1)
    length = cached + new

    def sees(i, j):
        if kind.causal and j > i:
            return False
        if kind.window is not None and j <= i - kind.window:
            return False
        back = 0 if kind.chunk is None else i // kind.chunk - j // kind.chunk
        return {"successive": back == 1, "inter": back > 1}.get(kind.chunks, back == 0)

    seen = [j for j in range(length) if any(sees(i, j) for i in range(first, last + 1))]
    if not seen:
        return 0
    low = seen[0] // kind.align * kind.align if kind.align else seen[0]
    return -(-(seen[-1] + 1 - low) // kind.tiling.block_n)


def expected_blocks(kind, lengths, chosen):
    return {
        (request, head, tile): list(range(blocks_of(kind, cached, new, tile)))
        for request, (cached, new) in enumerate(lengths)
        if chosen(new)
        for head in range(kind.kv_heads)
        for tile in range(-(-new * kind.group // kind.tiling.block_m))
    }


def walk(shares, case, lengths):
    kind, work, order = shares.kind, shares.work.view(-1, 16).tolist(), {}
    items = sorted(expected_blocks(kind, lengths, CHOSEN[kind.rows]))
    parts = {}
    for program in range(shares.programs):
        request, tile, head, block, left, first, last, slot, start, new, length = work[program][:11]
        position = items.index((request, head, tile)) if left > 0 else 0
        if left > 0:
            cached, new_tokens = lengths[request]
            assert (start, new, length) == (int(case.batch.query_start[request]), new_tokens, cached + new_tokens)
            parts.setdefault(items[position], []).append((program, first, last, slot, 0))
        taken = 0
        while left > 0:
            item = items[position]
            take = min(left, blocks_of(kind, *lengths[item[0]], item[2]) - block)
            order.setdefault(item, []).extend(range(block, block + take))
            if taken and take < blocks_of(kind, *lengths[item[0]], item[2]):
                parts.setdefault(item, []).append((program, program, work[program + 1][6], 2 * program + 1, 1))
            left, block, position, taken = left - take - kind.tiling.item_cost, 0, position + 1, taken + 1
    for item, found in parts.items():  # everyone who has a part of an item agrees on whose parts to merge
        if len(order[item]) > 0 and len(found) > 1:
            firsts, lasts, slots = ({part[i] for part in found} for i in (1, 2, 3))
            assert len(firsts) == len(lasts) == len(slots) == 1, (item, found)
            assert firsts == {found[0][0]} and lasts == {found[-1][0]}
    return {item: order.get(item, []) for item in items}


OTHERS = [(5, 1), (64, 1), (200, 7)]


def last_row(length, chunk, place, feature):
    """The last row of a request of `length` tokens, run as its last `chunk` tokens at one place among others."""
    whole = make([(0, length)], spec_of(feature), page_size=16, dtype=torch.float16)
    lengths = [*OTHERS[:place], (length - chunk, chunk), *OTHERS[place:]] if place is not None else [(length - chunk, chunk)]
    case = make(lengths, spec_of(feature), page_size=16, dtype=torch.float16, seed=1)
    case.sinks = whole.sinks
    mine = 0 if place is None else place
    for part, dense in (("key", whole.key), ("value", whole.value)):
        target = getattr(case.pool, part)(LAYER)
        for position in range(length - chunk):
            page, offset = divmod(position, 16)
            target[case.batch.page_table[mine, page], offset] = dense[position]
    for name in ("query", "key", "value"):
        getattr(case, name)[case.rows(mine)] = getattr(whole, name)[length - chunk : length]
    output, _ = run(case, DETERMINISTIC)
    return output[case.rows(mine)][-1]


@pytest.mark.parametrize("feature", ["window", "gqa_7_sinks"])
@pytest.mark.usefixtures("exact_products")
def test_a_row_is_bitwise_the_same_in_any_batch_and_chunk(feature):
    expected = last_row(150, 1, None, feature)
    for chunk, place in ((1, 0), (1, 3), (2, 1), (40, None), (150, 2)):
        assert torch.equal(last_row(150, chunk, place, feature), expected), (chunk, place)


def test_the_workspace_does_not_grow_with_the_batch():
    for counts in ((2, tiling.TOGETHER - 1), (tiling.TOGETHER, 64)):
        few, many = (make([(40, 1)] * count, page_size=16) for count in counts)
        sizes = [TRITON.plan(case.batch, case.pool).partial.numel() for case in (few, many)]
        assert sizes[0] == sizes[1]


def test_layers_of_one_kind_share_one_deal():
    case = make([(40, 1), (3, 5)], page_size=16)
    plan = TRITON.plan(case.batch, case.pool)
    assert plan.by_layer[0] == plan.by_layer[1] != plan.by_layer[2]  # the third layer has one KV head
    assert len(plan.shares) == 4  # two kinds of layers, rows "one" and "more"


# Keys in a block, buffers for them, tiles of queries: of long contexts, of short ones.
WIDER = ((192, 128, ((128, 2, 1), (64, 3, 2))), (256, 256, ((64, 2, 1),) * 2), (96, 96, ((128, 3, 2), (64, 4, 2))),
         (160, 160, ((64, 3, 2),) * 2), (160, 128, ((128, 2, 2), (64, 4, 2))))  # fmt: skip


def test_tilings_fit_the_machine():
    hopper, other = Machine(132, hopper=True, early=True), Machine(108, hopper=False, early=False)
    spec = spec_of(dim=128)
    wide = tiling.tiling("more", spec_of_dims(128, 128), torch.bfloat16, 512, 9000, 512, hopper)
    assert wide.hopper and not tiling.tiling("more", spec_of_dims(128, 128), torch.bfloat16, 512, 9000, 512, other).hopper
    tables = ({"alibi_slopes": (0.5,) * 4}, {"bias_index": "distance"})
    dims = ((128, 64), (32, 32), (112, 112), (224, 224), (320, 320), (192, 256), (72, 72))
    for unfit in (*(spec_of_dims(*each) for each in dims), *(spec_of_dims(128, 128, **table) for table in tables)):
        assert not tiling.tiling("more", unfit, torch.bfloat16, 512, 9000, 512, hopper).hopper
    for let_in in ({"softcap": 3.0}, {"has_sinks": True}, {"chunk": 64}, {"causal": False}, {"gives_lse": True}, {"sliding_window": 64}):
        for dim, stages in ((64, 4), (128, 2)):
            long, short = (
                tiling.tiling("more", spec_of_dims(dim, dim, **let_in), torch.bfloat16, 512, context, 512, hopper)
                for context in (2049, 2048)
            )
            assert long.hopper and (long.block_n, long.stages) == (128, stages)
            assert short.hopper and (short.block_n, short.stages) == (64, 4)
    for qk, v, numbers in WIDER:
        for context in (9000, 1000):
            tiles = tiling.tiling("more", spec_of_dims(qk, v), torch.bfloat16, 512, context, 512, hopper)
            assert tiles.hopper and (tiles.block_n, tiles.stages, tiles.query_tiles) == numbers[context < 2048]
            assert 2 * (128 * qk * tiles.query_tiles + tiles.block_n * tiles.stages * (qk + v)) <= tiling.HOPPER_BYTES
    assert not tiling.tiling("more", spec_of_dims(128, 128), torch.float32, 512, 9000, 512, hopper).hopper
    steps = ((1000, 1), (16_000, 1), (4096, 4), (4096, 40), (1 << 20, 1))
    decoding = [tiling.tiling("one", spec, torch.bfloat16, 1, keys, keys, hopper, decodes) for keys, decodes in steps]
    assert [(each.programs_per_sm, each.stages, each.block_n) for each in decoding] == [
        (1, 1, 64), (1, 1, 128), (1, 1, 128), (1, 3, 64), (2, 3, 64)
    ]  # fmt: skip
    assert [(each.early, each.first_block_early) for each in decoding] == [(True, True), *[(True, False)] * 3, (False, False)]
    window = replace(spec, sliding_window=512)
    assert tiling.tiling("one", window, torch.bfloat16, 1, 1 << 20, 1 << 20, hopper).first_block_early
    assert not tiling.tiling("one", spec, torch.bfloat16, 1, 4096, 4096, replace(hopper, early=False)).early


def test_blocks_without_a_pipeline_fit_the_machine():
    """What these would take was read from kernels compiled for an L4: 104 KiB of 99 with 64 keys, and 74 with 16 rows."""
    small = Machine(58, hopper=False, early=False, shared_bytes=99 << 10)
    for query_heads, block_n in ((64, 32), (16, 64)):
        spec = replace(spec_of_dims(256, 256), num_q_heads=query_heads, num_kv_heads=1)
        tiles = tiling.tiling("one", spec, torch.bfloat16, 1, 600, 600, small)
        assert (tiles.first_block_early, tiles.stages, tiles.block_n) == (True, 1, block_n)
    assert tiling._fitting(tiles, spec, 2, 1).block_n == 16


def test_waves_of_long_prompts():
    """What all programs read at a time fits the L2; short prompts and few new tokens are one wave."""
    hopper = Machine(132, hopper=True, early=True, l2_bytes=50 << 20)
    deepseek = spec_of_dims(192, 128, num_q_heads=16, num_kv_heads=16)
    llama, gemma = spec_of_dims(128, 128, num_q_heads=32, num_kv_heads=8), spec_of_dims(256, 256, num_q_heads=16, num_kv_heads=8)

    def waves(spec, new, context, requests=1, machine=hopper):
        return tiling.tiling("more", spec, torch.bfloat16, new, context, requests * context, machine).waves

    assert [waves(deepseek, min(context, 8192), context) for context in (2048, 8192, 16_000, 64_000)] == [1, 2, 3, 8]  # 84, 164, 655 MB
    assert [waves(deepseek, new, 16_000) for new in (64, 512, 1024, 2048)] == [1, 1, 1, 3]
    mha = spec_of_dims(128, 128, num_q_heads=32, num_kv_heads=32)
    assert (waves(mha, 4096, 4096, requests=2), waves(mha, 512, 512, requests=16)) == (3, 1)
    assert [waves(llama, 8192, context) for context in (8192, 16_000, 32_000)] == [1, 1, 2]  # 33, 66 and 131 MB
    assert [waves(gemma, 8192, context) for context in (8192, 16_000, 64_000)] == [1, 2, 4]
    assert waves(replace(llama, sliding_window=512), 8192, 64_000) == 1
    assert waves(deepseek, 8192, 16_000, machine=Machine(132, hopper=True, early=True)) == 1


def spec_of_dims(qk, v, **more):
    return replace(spec_of(), qk_head_dim=qk, v_head_dim=v, **more)
