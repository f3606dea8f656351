"""`unmet`: pure, complete, and every reason carries the value."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_attn.attn_ops.spec import AttentionSpec
from paged_attn.backends.capabilities import ANY_SIZE, Capabilities, Feature, Problem, Span, unmet
from paged_attn.backends.registry import backend_class, backend_names

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


def test_all_reasons_are_listed_at_once():
    problem = Problem(
        AttentionSpec(9, 1, 24, 24, 1.0, sliding_window=4, has_sinks=True), torch.float32, torch.float32, 1, "cuda", 75,
        extra=frozenset({Feature.MLA}),
    )  # fmt: skip
    assert len(unmet(CAN, problem)) == 1 + 2 + 4 + 3


def test_no_architectures_means_any():
    anywhere = dataclasses.replace(CAN, architectures=frozenset())
    assert unmet(anywhere, dataclasses.replace(WANT, architecture=120)) == []


@pytest.mark.parametrize(
    ("span", "inside", "outside"),
    [(Span(1, 3), (1, 2, 3), (0, 4)), (Span(16, 64, 16), (16, 32, 64), (0, 8, 24, 80)), (ANY_SIZE, (1, 7, 1 << 20), (0, -1))],
)
def test_spans_hold_both_ends(span, inside, outside):
    assert all(value in span for value in inside)
    assert not any(value in span for value in outside)


spans = st.builds(Span, st.integers(1, 4), st.integers(4, 9), st.integers(1, 3))
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
)


@st.composite
def likely_pairs(draw):
    """Random pairs almost never fit; half of these take what the problem asks for into the capabilities, bar one thing perhaps."""
    able, problem = draw(capabilities), draw(problems)
    if draw(st.booleans()):
        fitting = {
            "devices": frozenset({problem.device}), "dtypes": frozenset({problem.dtype}), "kv_dtypes": frozenset({problem.kv_dtype}),
            "features": problem.features | able.features, "architectures": frozenset(), "head_dims": Span(1, 10), "page_sizes": Span(1, 10),
            "group_sizes": Span(1, 10),
        }  # fmt: skip
        fitting.pop(draw(st.sampled_from([*sorted(fitting), ""])), None)
        able = dataclasses.replace(able, **fitting)
    return able, problem


def within(span: Span, value: int) -> bool:
    return value in range(span.low, span.high + 1, span.step)


@settings(max_examples=300, deadline=None)
@given(likely_pairs())
def test_empty_exactly_if_every_condition_holds(pair):
    able, problem = pair
    spec = problem.spec
    conditions = [
        problem.device in able.devices and (not able.architectures or problem.architecture in able.architectures),
        problem.dtype in able.dtypes,
        problem.kv_dtype in able.kv_dtypes,
        within(able.head_dims, spec.qk_head_dim),
        within(able.head_dims, spec.v_head_dim),
        within(able.page_sizes, problem.page_size),
        within(able.group_sizes, spec.num_q_heads // spec.num_kv_heads),
    ]
    needed = {
        Feature.WINDOW: spec.sliding_window, Feature.CHUNK: spec.chunk, Feature.SOFTCAP: spec.softcap, Feature.SINKS: spec.has_sinks,
        Feature.LSE: spec.gives_lse,
        Feature.ALIBI: spec.alibi_slopes, Feature.POSITION_BIAS: spec.bias_index, Feature.BIDIRECTIONAL: not spec.causal,
        Feature.UNEQUAL_DIMS: spec.qk_head_dim - spec.v_head_dim,
    }  # fmt: skip
    for feature in Feature:
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
        Feature.SOFTCAP,
        Feature.SINKS,
        Feature.ALIBI,
        Feature.POSITION_BIAS,
        Feature.BIDIRECTIONAL,
        Feature.LSE,
        Feature.UNEQUAL_DIMS,
    }
    assert features - {Feature.DETERMINISTIC} == tested
    assert name in backend_names()
