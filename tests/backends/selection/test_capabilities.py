"""`unmet`: pure, complete, and every reason carries the value."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.latent import HeadRows, LatentSpec
from paged_attn.backends.attention.capabilities import ANY_SIZE, PHASES, Both, Capabilities, Feature, OneOf, Problem, Span, unmet
from paged_attn.backends.attention.hybrid import shared_capabilities
from paged_attn.backends.selection.registry import backend_class, backend_names

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
SPEC = AttentionSpec(num_q_heads=8, num_kv_heads=2, qk_head_dim=64, v_head_dim=64, scale=0.125)
WANT = Problem(SPEC, torch.bfloat16, torch.bfloat16, 16, "cuda", 90)
CAN = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    kv_dtypes=frozenset({torch.bfloat16}),
    features=frozenset(),
    architectures=frozenset({80, 90}),
    head_dims=Span(64, 256, 64),
    page_sizes=Span(16, 64, 16),
    group_sizes=Span(1, 8),
)


def with_spec(**changes) -> Problem:
    return dataclasses.replace(WANT, spec=dataclasses.replace(SPEC, **changes))


def test_nothing_is_unmet():
    assert unmet(CAN, WANT) == []


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (dataclasses.replace(WANT, device="cpu", architecture=None), "runs on cuda, not on cpu"),
        (dataclasses.replace(WANT, architecture=75), "needs SM80, SM90, this GPU is SM75"),
        (dataclasses.replace(WANT, dtype=torch.float32), "dtype float32 is not among bfloat16, float16"),
        (dataclasses.replace(WANT, kv_dtype=torch.float16), "KV dtype float16 is not among bfloat16"),
        (dataclasses.replace(WANT, page_size=1), "page size 1 is not in 16 to 64 in steps of 16"),
        (with_spec(num_q_heads=18), "query heads per KV head 9 is not in 1 to 8"),
        (with_spec(sliding_window=5), "no sliding window"),
        (with_spec(chunk=5), "no chunked attention"),
        (with_spec(softcap=5.0), "no softcap"),
        (with_spec(has_sinks=True), "no attention sinks"),
        (with_spec(alibi_slopes=(1.0,) * 8), "no ALiBi"),
        (with_spec(bias_index="key"), "no biases by distance or key"),
        (with_spec(causal=False), "no bidirectional attention"),
        (with_spec(qk_head_dim=72, v_head_dim=72), "head dim 72 is not in 64 to 256 in steps of 64"),
        (dataclasses.replace(WANT, extra=frozenset({Feature.LSE})), "no log-sum-exp output"),
    ],
)
def test_one_reason_with_its_value(problem, reason):
    assert unmet(CAN, problem) == [reason]


def test_head_dims_are_named_apart():
    able = dataclasses.replace(CAN, features=frozenset({Feature.UNEQUAL_DIMS}))
    assert unmet(able, with_spec(qk_head_dim=72)) == ["head dim 72 is not in 64 to 256 in steps of 64"]
    assert unmet(able, with_spec(v_head_dim=512)) == ["head dim of v 512 is not in 64 to 256 in steps of 64"]
    assert unmet(CAN, with_spec(v_head_dim=128)) == ["no v head dim unlike qk's"]


def test_rows_of_latents_have_sizes_of_their_own():
    able = dataclasses.replace(CAN, features=frozenset({Feature.MLA, Feature.UNEQUAL_DIMS}), latent_dims=(Span(1, 512), Span(0, 64)))

    def asked(rank, rotated):
        rows = HeadRows(0, 256)
        spec = LatentSpec(16, 1, rank + rotated, rank, 0.1, rotated=rotated, key_dim=128, value_dim=128, keys=rows, values=rows)
        return dataclasses.replace(WANT, spec=spec)

    able = dataclasses.replace(able, group_sizes=ANY_SIZE)
    assert unmet(able, asked(512, 64)) == unmet(able, asked(96, 0)) == []
    assert unmet(able, asked(1024, 128)) == [
        "rank of the latent 1024 is not in 1 to 512", "rotated part of the latent 128 is not in 0 to 64",
    ]  # fmt: skip
    assert unmet(dataclasses.replace(able, latent_dims=None), asked(512, 64)) == [
        "head dim 576 is not in 64 to 256 in steps of 64", "head dim of v 512 is not in 64 to 256 in steps of 64",
    ]  # fmt: skip
    other = dataclasses.replace(able, latent_dims=None, head_dims=ANY_SIZE)
    assert shared_capabilities(able, other).latent_dims == able.latent_dims and shared_capabilities(other, other).latent_dims is None


def test_all_reasons_are_listed_at_once():
    problem = Problem(
        AttentionSpec(9, 1, 24, 24, 1.0, sliding_window=4, has_sinks=True), torch.float32, torch.float32, 1, "cuda", 75,
        extra=frozenset({Feature.MLA}),
    )  # fmt: skip
    assert len(unmet(CAN, problem)) == 1 + 2 + 3 + 3


def test_no_architectures_means_any():
    anywhere = dataclasses.replace(CAN, architectures=frozenset())
    assert unmet(anywhere, dataclasses.replace(WANT, architecture=120)) == []


@pytest.mark.parametrize(
    ("sizes", "inside", "outside", "words"),
    [
        (Span(1, 3), (1, 2, 3), (0, 4), "1 to 3"),
        (Span(16, 64, 16), (16, 32, 64), (0, 8, 24, 80), "16 to 64 in steps of 16"),
        (ANY_SIZE, (1, 7, 1 << 20), (0, -1), "1 to 1073741824"),
        (OneOf({128, 64}), (64, 128), (0, 63, 65, 192), "64, 128"),
        (OneOf([]), (), (0, 1), "none"),
        (Both(Span(16, 64, 16), OneOf((32, 48, 50))), (32, 48), (16, 50, 64), "both 16 to 64 in steps of 16 and 32, 48, 50"),
    ],
)
def test_sizes_hold_what_they_say(sizes, inside, outside, words):
    assert all(value in sizes for value in inside)
    assert not any(value in sizes for value in outside)
    assert str(sizes) == words and hash(sizes) == hash(copy.deepcopy(sizes)) and sizes == copy.deepcopy(sizes)


@pytest.mark.parametrize(
    ("able", "asked", "reasons"),
    [
        ({"extend"}, PHASES, ["serves extend, not decode"]),
        ({"decode"}, PHASES, ["serves decode, not extend"]),
        ({"decode"}, {"decode"}, []),
        (PHASES, {"decode"}, []),
        (set(), PHASES, ["serves no phase, not decode, extend"]),
    ],
)
def test_phases(able, asked, reasons):
    capabilities = dataclasses.replace(CAN, phases=frozenset(able))
    assert unmet(capabilities, dataclasses.replace(WANT, phases=frozenset(asked))) == reasons


def test_pairs_of_dims_stand_for_unequal_dims():
    able = dataclasses.replace(CAN, dim_pairs=frozenset({(192, 128), (64, 512)}))
    assert unmet(able, with_spec(qk_head_dim=192, v_head_dim=128)) == []
    assert unmet(able, with_spec(qk_head_dim=64, v_head_dim=512)) == []  # 512 is not among the head dims
    assert unmet(able, with_spec(qk_head_dim=128, v_head_dim=192)) == ["head dims 128/192 of qk/v are not among 64/512, 192/128"]
    assert unmet(able, with_spec(qk_head_dim=512, v_head_dim=512)) == ["head dim 512 is not in 64 to 256 in steps of 64"]
    every = dataclasses.replace(able, features=frozenset({Feature.UNEQUAL_DIMS}))
    assert unmet(every, with_spec(qk_head_dim=128, v_head_dim=192)) == []
    assert unmet(every, with_spec(qk_head_dim=64, v_head_dim=512)) == ["head dim of v 512 is not in 64 to 256 in steps of 64"]


@pytest.mark.parametrize(
    ("devices", "device", "runs"),
    [("cpu", "cpu-amx", True), ("cpu-amx", "cpu-amx", True), ("cpu-amx", "cpu", False), ("cuda", "hip", False), ("cuda", "cuda", True)],
)
def test_a_cpu_with_amx_is_a_cpu(devices, device, runs):
    able = dataclasses.replace(CAN, devices=frozenset({devices}), architectures=frozenset())
    assert able.runs_on(device) is runs
    reasons = unmet(able, dataclasses.replace(WANT, device=device, architecture=None))
    assert reasons == ([] if runs else [f"runs on {devices}, not on {device}"])


spans = st.one_of(
    st.builds(Span, st.integers(1, 4), st.integers(4, 9), st.integers(1, 3)),
    st.builds(OneOf, st.frozensets(st.integers(1, 10), max_size=4)),
)
capabilities = st.builds(
    Capabilities,
    devices=st.frozensets(st.sampled_from(["cpu", "cuda", "xpu"])),
    dtypes=st.frozensets(st.sampled_from(DTYPES)),
    kv_dtypes=st.frozensets(st.sampled_from(DTYPES)),
    features=st.frozensets(st.sampled_from(Feature)),
    architectures=st.frozensets(st.sampled_from([80, 90, 100])),
    head_dims=spans,
    page_sizes=spans,
    group_sizes=spans,
    phases=st.frozensets(st.sampled_from(sorted(PHASES))),
    dim_pairs=st.frozensets(st.tuples(st.integers(1, 10), st.integers(1, 10)).filter(lambda pair: pair[0] != pair[1]), max_size=3),
)
specs = st.builds(
    lambda group, kv, qk, v, window, chunk, softcap, sinks, alibi, causal: AttentionSpec(
        group * kv, kv, qk, v, 1.0, causal, window, chunk, softcap, sinks, (1.0,) * (group * kv) if alibi else None
    ),
    st.integers(1, 10), st.integers(1, 3), st.integers(1, 10), st.integers(1, 10), st.sampled_from([None, 1, 8]),
    st.sampled_from([None, 8]), st.sampled_from([None, 30.0]), st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
problems = st.builds(
    Problem,
    spec=specs,
    dtype=st.sampled_from(DTYPES),
    kv_dtype=st.sampled_from(DTYPES),
    page_size=st.integers(1, 10),
    device=st.sampled_from(["cpu", "cuda"]),
    architecture=st.sampled_from([None, 75, 80, 90]),
    extra=st.frozensets(st.sampled_from(Feature), max_size=2),
    phases=st.frozensets(st.sampled_from(sorted(PHASES)), min_size=1),
)


@st.composite
def likely_pairs(draw):
    """Random pairs almost never fit; half of these take what the problem asks for into the capabilities, bar one thing perhaps."""
    able, problem = draw(capabilities), draw(problems)
    if draw(st.booleans()):
        fitting = {
            "devices": frozenset({problem.device}), "dtypes": frozenset({problem.dtype}), "kv_dtypes": frozenset({problem.kv_dtype}),
            "features": problem.features | able.features, "architectures": frozenset(), "head_dims": Span(1, 10), "page_sizes": Span(1, 10),
            "group_sizes": Span(1, 10), "phases": PHASES,
        }  # fmt: skip
        fitting.pop(draw(st.sampled_from([*sorted(fitting), ""])), None)
        able = dataclasses.replace(able, **fitting)
    return able, problem


def within(sizes: Span | OneOf, value: int) -> bool:
    return value in (range(sizes.low, sizes.high + 1, sizes.step) if isinstance(sizes, Span) else sizes)


@settings(max_examples=300, deadline=None)
@given(likely_pairs())
def test_empty_exactly_if_every_condition_holds(pair):
    able, problem = pair
    spec = problem.spec
    dims = (spec.qk_head_dim, spec.v_head_dim)
    by_pair = dims[0] != dims[1] and Feature.UNEQUAL_DIMS not in able.features and bool(able.dim_pairs)
    conditions = [
        problem.device in able.devices and (not able.architectures or problem.architecture in able.architectures),
        problem.dtype in able.dtypes,
        problem.kv_dtype in able.kv_dtypes,
        problem.phases <= able.phases,
        by_pair or within(able.head_dims, spec.qk_head_dim),
        by_pair or dims[0] == dims[1] or within(able.head_dims, spec.v_head_dim),
        not by_pair or dims in able.dim_pairs,
        within(able.page_sizes, problem.page_size),
        within(able.group_sizes, spec.num_q_heads // spec.num_kv_heads),
    ]
    needed = {
        Feature.WINDOW: spec.sliding_window, Feature.CHUNK: spec.chunk, Feature.SOFTCAP: spec.softcap, Feature.SINKS: spec.has_sinks,
        Feature.LSE: spec.gives_lse,
        Feature.ALIBI: spec.alibi_slopes, Feature.POSITION_BIAS: spec.bias_index, Feature.BIDIRECTIONAL: not spec.causal,
        Feature.WINDOW_AHEAD: spec.window_ahead, Feature.UNEQUAL_DIMS: spec.qk_head_dim - spec.v_head_dim,
    }  # fmt: skip
    for feature in set(Feature) - ({Feature.UNEQUAL_DIMS} if by_pair else set()):
        conditions.append(not (needed.get(feature) or feature in problem.extra) or feature in able.features)
    before = copy.deepcopy((able, problem))
    reasons = unmet(able, problem)
    assert len(reasons) == conditions.count(False)
    assert (able, problem) == before and unmet(able, problem) == reasons


@pytest.mark.parametrize("name", ["torch_native", "reference"])
def test_built_in_backends_claim_what_the_tests_run(name):
    features = backend_class(name).capabilities.features
    tested = {
        Feature.WINDOW,
        Feature.CHUNK,
        Feature.DUAL_CHUNK,
        Feature.SOFTCAP,
        Feature.SINKS,
        Feature.ALIBI,
        Feature.POSITION_BIAS,
        Feature.BIDIRECTIONAL,
        Feature.WINDOW_AHEAD,
        Feature.LSE,
        Feature.MLA,
        Feature.UNEQUAL_DIMS,
    }
    assert features - {Feature.DETERMINISTIC} == tested
    assert name in backend_names()
