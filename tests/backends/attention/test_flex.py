"""flex against the float32 oracle: uncompiled on the CPU, and through a kernel that reads only the blocks that the mask lists."""

import contextlib
import dataclasses
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_attn.attn_ops.batch.batch import ForwardMode
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.backends.attention.capabilities import Problem, unmet
from paged_attn.backends.attention.flex import backend as flex_module
from paged_attn.backends.attention.flex import mods, step
from paged_attn.backends.attention.flex.backend import FlexBackend
from paged_attn.backends.attention.reference import ReferenceBackend
from tests.backends.agreeing import agree
from tests.backends.problems import FEATURES, LAYER, LAYOUTS, STRIDES, bits, close, copy_of, make, new_output, run, spec_of

REFERENCE = ReferenceBackend()
MODES = {
    ForwardMode.EXTEND: [(0, 7), (0, 1), (0, 18), (9, 4)],
    ForwardMode.DECODE: [(1, 1), (15, 1), (16, 1), (30, 1)],
    ForwardMode.MIXED: [(17, 1), (0, 1), (6, 5), (33, 1), (0, 20)],
}


def spec_here(feature="plain"):
    """With head dims that the kernel takes: at least 16."""
    spec = spec_of(feature)
    return dataclasses.replace(spec, qk_head_dim=spec.qk_head_dim * 4, v_head_dim=spec.v_head_dim * 4, scale=0.2)


@pytest.fixture(scope="module")
def backend():
    return FlexBackend()


@pytest.mark.parametrize("lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_in_every_mode(backend, feature, mode, lse):
    spec = spec_here(feature)
    assert unmet(backend.capabilities, Problem(spec, torch.float32, torch.float32, 4, "cpu")) == []
    agree(make(MODES[mode], spec, page_size=4, extra_rows=3), backend, lse=lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("feature", ["plain", "all"])
def test_dtypes(backend, feature, dtype):
    agree(make(MODES[ForwardMode.MIXED], spec_here(feature), page_size=4, dtype=dtype), backend, lse=feature == "all")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_layouts(backend, page_size, layout):
    lengths = [(70, 1), (68, 3), (64, 1)] if layout == "shared" else MODES[ForwardMode.MIXED]
    agree(make(lengths, spec_here(), page_size=page_size, layout=layout), backend)


@pytest.mark.parametrize("feature", ["plain", "window", "chunk", "bidirectional", "bidirectional_chunk"])
def test_lengths_around_the_edges_of_blocks_and_tiles(backend, feature):
    ends = [1, 2, 15, 16, 17, 127, 128, 129, 257]
    agree(make([(end - 1, 1) for end in ends if end > 1], spec_here(feature), page_size=16), backend)
    agree(make([(0, 16), (125, 16), (112, 17)], spec_here(feature), page_size=16), backend)


@pytest.mark.parametrize("strides", STRIDES)
def test_odd_strides(backend, strides):
    case = make(MODES[ForwardMode.MIXED], spec_here("sinks"), page_size=4, strides=strides, extra_rows=2)
    expected, _ = run(copy_of(case), REFERENCE)
    output = new_output(case, strides)
    with ForwardContext(case.batch, case.pool, backend):
        UNIFIED_ATTENTION(case.query, case.key, case.value, output, LAYER, True, sinks=case.sinks)
    close(output, expected)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.sampled_from([0, 0, 1, 3, 7, 15, 16, 17, 31]), st.integers(1, 6)), min_size=1, max_size=5),
    feature=st.sampled_from(sorted(FEATURES)),
    page_size=st.sampled_from([1, 2, 16, 64]),
    layout=st.sampled_from(LAYOUTS),
    strides=st.sampled_from(STRIDES),
    extra_rows=st.integers(0, 3),
    lse=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_batch(backend, lengths, feature, page_size, layout, strides, extra_rows, lse, seed):
    case = make(
        lengths, spec_here(feature), page_size=page_size, layout=layout, strides=strides, extra_rows=extra_rows, seed=seed
    )  # fmt: skip
    agree(case, backend, lse=lse)


def test_an_idle_step_gives_zeros_and_stores_nothing(backend):
    case = make([(0, 2)], spec_here())
    case.batch = type(case.batch).build([], case.pool.page_size)
    before = bits(case.pool.storage).clone()
    output, lse = run(case, backend, lse=True)
    assert not output.any() and not lse.any() and torch.equal(bits(case.pool.storage), before)


def test_a_layer_that_shares_kv_reads_but_does_not_write(backend):
    case = make(MODES[ForwardMode.MIXED], spec_here(), page_size=4)
    first, _ = run(case, backend)
    pool = KVPool([case.pool.layers[0], case.spec, dataclasses.replace(case.spec, kv_layer=LAYER)], case.pool.num_pages, 4, torch.float32)
    pool.key(LAYER).copy_(case.pool.key(LAYER))
    pool.value(LAYER).copy_(case.pool.value(LAYER))
    before = bits(pool.storage).clone()
    case.pool, case.key, case.value = pool, case.key * float("nan"), case.value * float("nan")
    output, _ = run(case, backend, save=False, layer=2)
    close(output, first)
    assert torch.equal(bits(pool.storage), before)


def test_layers_with_the_same_mask_share_what_is_planned(backend, monkeypatch):
    case, planned = make(MODES[ForwardMode.DECODE], spec_here("window"), page_size=4), []
    monkeypatch.setattr(flex_module.Keys, "of", lambda *arguments: planned.append(arguments))
    backend.plan_in_graph(backend.plan(case.batch, case.pool))
    assert len(planned) == 1 and len(case.pool.layers) == 3


def test_a_window_bounds_what_is_gathered(backend):
    case = make([(1000, 1), (900, 3)], dataclasses.replace(spec_here(), sliding_window=100), page_size=16)
    plan = backend.plan(case.batch, case.pool)
    backend.plan_in_graph(plan)
    assert [keys.pages.shape[0] for keys in plan.keys.values()] == [2 * mods.KEY_BLOCK]


def blockwise(counters):
    """flex_attention as its compiled kernel works: of the keys, only the blocks listed for a tile are read."""

    def flex_attention(
        query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, kernel_options=None, *, return_aux=None
    ):
        _, heads, length, _ = query.shape
        tile, block = block_mask.BLOCK_SIZE
        group = heads // key.shape[1]
        assert enable_gqa == (group > 1) and length % tile == 0 and key.shape[2] % block == 0
        assert block_mask.shape[-2:] == (length, key.shape[2])
        output, lse = query.new_zeros(1, heads, length, value.shape[-1]), torch.full((1, heads, length), -torch.inf)
        zero, h = torch.tensor(0), torch.arange(heads)[:, None, None]
        for t in range(length // tile):
            listed = block_mask.kv_indices[0, 0, t, : block_mask.kv_num_blocks[0, 0, t]].long()
            assert len(set(listed.tolist())) == len(listed) and (listed < key.shape[2] // block).all()
            counters.append(len(listed))
            if not len(listed):
                continue
            kv = (listed[:, None] * block + torch.arange(block)).flatten()
            q = torch.arange(t * tile, (t + 1) * tile)[:, None]
            seen = block_mask.mask_mod(zero, h, q, kv[None]).expand(heads, tile, -1)
            assert seen.unflatten(-1, (-1, block)).any(-1).any(0).any(0).all(), "a block that no query of the tile sees"
            keys, values = (x[0].repeat_interleave(group, 0)[:, kv].float() for x in (key, value))
            scores = query[0, :, q[:, 0]].float() @ keys.transpose(1, 2) * scale
            if score_mod is not None:
                scores = score_mod(scores, zero, h, q, kv[None])
            scores = scores.masked_fill(~seen, -torch.inf)
            lse[0, :, q[:, 0]] = torch.logsumexp(scores, -1)
            output[0, :, q[:, 0]] = (torch.softmax(scores, -1).nan_to_num(0.0) @ values).to(query.dtype)
        return output if return_aux is None else (output, types.SimpleNamespace(lse=lse))

    return flex_attention


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 4 keys, tiles of 2 or 4 queries, and the kernel above; the value is the blocks that each tile read."""
    counters = []
    for module in (mods, step):
        monkeypatch.setattr(module, "KEY_BLOCK", 4)
    monkeypatch.setattr(step, "SMALL_TILE", 2)
    monkeypatch.setattr(step, "LARGE_TILE", 4)
    monkeypatch.setattr(mods, "flex_attention", blockwise(counters))
    return counters


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
@pytest.mark.parametrize("feature", FEATURES)
def test_the_listed_blocks_are_enough_and_none_is_idle(backend, small_blocks, feature, mode):
    agree(make(MODES[mode], spec_here(feature), page_size=4, extra_rows=1), backend, lse=True)


def test_how_many_blocks_are_read(backend, small_blocks):
    """20 keys cached and 1 new, window 5: keys 16 to 20, gathered into 2 blocks; 10 new ones of which tiles of 4 see ever more."""
    run(make([(20, 1)], spec_here("window"), page_size=4), backend)
    assert small_blocks == [2, 0]  # a tile of padding, since one alone would be a constant for torch.compile
    small_blocks.clear()
    run(make([(0, 10)], spec_here(), page_size=4), backend)
    assert small_blocks == [1, 2, 3]


@pytest.mark.parametrize("feature", FEATURES)
def test_the_loads_of_a_bias_are_not_pipelined(backend, monkeypatch, feature):
    given, attention = [], mods.flex_attention
    monkeypatch.setattr(mods, "flex_attention", lambda *a, **options: given.append(options["kernel_options"]) or attention(*a, **options))
    spec = spec_here(feature)
    for mode in MODES:
        run(make(MODES[mode], spec, page_size=4), backend)
    assert [options.get("num_stages") for options in given] == [1 if spec.bias_index else None] * len(MODES)


@pytest.fixture
def compiles(monkeypatch):
    """flex compiles, too, but with Dynamo alone: the kernels that Inductor makes of it need a GPU. The value counts graphs."""
    from torch._dynamo.utils import counters

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_with(function, backend="eager", **options))
    monkeypatch.setattr(flex_module, "attend", mods.compiled)
    monkeypatch.setattr(flex_module, "_uncompiled", contextlib.nullcontext)
    mods._compiled.cache_clear()
    yield lambda: counters["stats"]["unique_graphs"]
    mods._compiled.cache_clear()


def test_compiled_it_does_not_start_anew_for_every_batch(backend, compiles):
    # In the first no two sizes are equal by chance: 5 tiles, 3 blocks each, 80 queries, 1,920 keys, 4 and 2 heads.
    batches = [[(300, 1)] * 5, [(5, 1)] * 9, [(500, 2), (3, 1)], [(700, 1)] * 20, [(9, 3)] * 7]
    graphs = []
    for feature in ("plain", "all"):
        for lengths in batches:
            before = compiles()
            agree(make(lengths, spec_here(feature), page_size=16), backend)
            graphs.append(compiles() - before)
    assert graphs == [1, 0, 0, 0, 0] * 2


def test_layers_of_many_kinds_do_not_reach_dynamos_limit(backend, compiles):
    before, limit = compiles(), torch._dynamo.config.recompile_limit
    for window in range(1, limit + 2):
        run(make([(300, 1)] * 5, dataclasses.replace(spec_here(), sliding_window=window)), backend)
    assert compiles() - before == limit + 1


def test_models_of_many_head_sizes_do_not_reach_dynamos_limit(backend, compiles):
    """Seen on a GPU, whose tests run every head size in one process: from the ninth kind of operands on, Dynamo refused."""
    before, limit = compiles(), torch._dynamo.config.recompile_limit
    for dim in range(1, limit + 2):
        agree(make([(300, 1)] * 5, dataclasses.replace(spec_here(), qk_head_dim=8 * dim), page_size=16), backend)
    assert compiles() - before == limit + 1


def test_more_keys_than_the_kernel_can_address_are_refused(backend, monkeypatch):
    monkeypatch.setattr(flex_module, "MOST_ELEMENTS", 1000)
    with pytest.raises(
        UnsupportedError, match=r"would read 128 keys of 2 x 32 in one step, 8,192 elements; .* fewer than 1,000: run fewer"
    ):
        run(make([(3, 1)], spec_here()), backend)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"spec": spec_of()}, ["head dim 8 is not in 16 to 256"]),
        ({"dtype": torch.float64}, ["dtype float64 is not among bfloat16, float16, float32"]),
    ],
)
def test_what_it_refuses(change, reason):
    good = Problem(spec_here(), torch.float32, torch.float32, 16, "cpu")
    assert unmet(FlexBackend.capabilities, dataclasses.replace(good, **change)) == reason
