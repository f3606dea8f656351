"""Two backends as one: who serves which step, with what results, and what the two can run together."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_attn.attn_ops.batch.batch import ForwardMode
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.backends.attention.capabilities import ANY_SIZE, Feature, GraphSupport, OneOf, Span, unmet
from paged_attn.backends.attention.hybrid import hybrid_of, shared_capabilities
from paged_attn.backends.attention.reference import ReferenceBackend
from paged_attn.backends.attention.torch_native import TorchNativeBackend
from paged_attn.backends.needs import Requirement
from tests.backends.fake_backends import PLAIN, fake
from tests.backends.problems import bits, close, copy_of, make, new_output, run, spec_of
from tests.backends.selection.test_capabilities import CAN, capabilities, problems

EXTEND, DECODE = frozenset({"extend"}), frozenset({"decode"})


class Recording(ReferenceBackend):
    """Writes down what is called; its `forward` is its own, as that of a backend that fuses the KV write."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label, self.calls = label, list[str]()

    def plan(self, batch, pool):
        self.calls.append("plan")
        return super().plan(batch, pool)

    def plan_in_graph(self, plan):
        self.calls.append("plan_in_graph")

    def forward(self, plan, layer_id, spec, query, key, value, output, **keywords):
        self.calls.append(f"forward {sorted(keywords)}")
        super().forward(plan, layer_id, spec, query, key, value, output, **keywords)


@pytest.mark.parametrize("mode", ForwardMode)
def test_a_step_is_planned_and_run_by_the_one_that_serves_it(mode):
    children = {"prefill": Recording("prefill"), "decode": Recording("decode")}
    hybrid = hybrid_of(children["prefill"], children["decode"])
    case = make([(5, 1), (3, 1)], spec_of("sinks"))
    batch = dataclasses.replace(case.batch, mode=mode)
    output = new_output(case)
    with ForwardContext(batch, case.pool, hybrid) as context:
        assert context.plan.batch is batch
        UNIFIED_ATTENTION(case.query, case.key, case.value, output, 1, True, sinks=case.sinks)
    serving = "decode" if mode is ForwardMode.DECODE else "prefill"
    (other,) = {"prefill", "decode"} - {serving}
    assert children[other].calls == []
    assert children[serving].calls == ["plan", "plan_in_graph", "forward ['bias', 'lse_out', 'save_kv_cache', 'sinks']"]
    close(output, run(copy_of(make([(5, 1), (3, 1)], spec_of("sinks"))), ReferenceBackend())[0])


@pytest.mark.parametrize("feature", ["plain", "window_chunk", "all", "windowed_bias"])
@pytest.mark.parametrize("lengths", [[(5, 1), (17, 1)], [(0, 20), (5, 1)], [(0, 3), (16, 4)]])
@pytest.mark.parametrize("flipped", [False, True])
def test_results_are_those_of_the_two(lengths, feature, flipped):
    spec = dataclasses.replace(spec_of(feature), gives_lse=True)
    children = [TorchNativeBackend(), ReferenceBackend()]
    hybrid = hybrid_of(*children[:: -1 if flipped else 1])
    got = run(case := make(lengths, spec, extra_rows=3), hybrid, lse=True)
    expected = run(other := make(lengths, spec, extra_rows=3), ReferenceBackend(), lse=True)
    close(got[0], expected[0])
    close(got[1], expected[1])
    assert torch.equal(bits(case.pool.storage), bits(other.pool.storage))


def test_the_methods_of_the_contract_reach_the_serving_child():
    seen = []

    class Seeing(ReferenceBackend):
        def write_kv(self, plan, call):
            seen.append(("write_kv", plan, call))

        def forward_extend(self, plan, call):
            seen.append(("forward_extend", plan, call))

        def forward_decode(self, plan, call):
            seen.append(("forward_decode", plan, call))

    case = make([(5, 1)])
    hybrid = hybrid_of(ReferenceBackend(), Seeing())
    plan = hybrid.plan(case.batch, case.pool)
    hybrid.write_kv(plan, "call")
    hybrid.forward_extend(plan, "call")
    hybrid.forward_decode(plan, "call")
    assert seen == [(name, plan.plan, "call") for name in ("write_kv", "forward_extend", "forward_decode")]


def test_names_and_graphs():
    hybrid = hybrid_of(Recording("prefill"), Recording("decode"))
    assert hybrid.name == "reference,reference"
    graphs = {"extend": GraphSupport.ALWAYS, "decode": GraphSupport.UNIFORM_DECODE}
    other = {"extend": GraphSupport.UNIFORM_DECODE, "decode": GraphSupport.ALWAYS}
    shared = shared_capabilities(dataclasses.replace(PLAIN, graphs=graphs), dataclasses.replace(PLAIN, graphs=other))
    assert shared.graphs == {"extend": GraphSupport.ALWAYS, "decode": GraphSupport.ALWAYS}
    shared = shared_capabilities(dataclasses.replace(PLAIN, graphs={}), dataclasses.replace(PLAIN, graphs={}))
    assert shared.graphs == {"extend": GraphSupport.NEVER, "decode": GraphSupport.NEVER}


def test_one_that_does_not_serve_its_phase_is_refused():
    both = fake("both")()
    prefill, decode = (fake(str(phases), dataclasses.replace(PLAIN, phases=phases))() for phases in (EXTEND, DECODE))
    assert hybrid_of(prefill, decode).decode is decode
    with pytest.raises(UnsupportedError, match="cannot serve prefill: its capabilities lack extend"):
        hybrid_of(decode, both)
    with pytest.raises(UnsupportedError, match="cannot serve decode: its capabilities lack decode"):
        hybrid_of(both, prefill)


# What two can run together.


@settings(max_examples=400, deadline=None)
@given(capabilities, capabilities, problems, st.booleans())
def test_two_fit_exactly_where_each_fits_in_its_phase(prefill, decode, problem, likely):
    if likely:  # random ones almost never fit
        able = dataclasses.replace(
            PLAIN, devices=frozenset({problem.device}), dtypes=frozenset({problem.dtype}), kv_dtypes=frozenset({problem.kv_dtype}),
            features=problem.features,
        )  # fmt: skip
        prefill = dataclasses.replace(able, head_dims=prefill.head_dims, dim_pairs=prefill.dim_pairs, phases=prefill.phases)
        decode = dataclasses.replace(able, page_sizes=decode.page_sizes, architectures=decode.architectures)
    problem = dataclasses.replace(problem, phases=EXTEND | DECODE)
    each = [
        unmet(prefill, dataclasses.replace(problem, phases=EXTEND)),
        unmet(decode, dataclasses.replace(problem, phases=DECODE)),
    ]
    together = unmet(shared_capabilities(prefill, decode), problem)
    deterministic = Feature.DETERMINISTIC in problem.features
    assert bool(together) == (any(each) or deterministic)


def test_each_gives_its_own_phase():
    prefill, decode = (dataclasses.replace(PLAIN, phases=phases) for phases in (EXTEND, DECODE))
    assert shared_capabilities(prefill, decode).phases == EXTEND | DECODE
    assert shared_capabilities(decode, prefill).phases == frozenset()
    assert shared_capabilities(PLAIN, prefill).phases == EXTEND and shared_capabilities(decode, PLAIN).phases == DECODE


def test_it_is_never_batch_invariant():
    able = dataclasses.replace(PLAIN, features=frozenset(Feature))
    assert shared_capabilities(able, able).features == frozenset(Feature) - {Feature.DETERMINISTIC}


def test_no_common_architecture_is_no_device():
    hopper, blackwell = (dataclasses.replace(CAN, architectures=frozenset({a})) for a in (90, 100))
    assert shared_capabilities(hopper, blackwell).devices == frozenset()
    assert shared_capabilities(hopper, dataclasses.replace(CAN, architectures=frozenset())).architectures == {90}
    assert shared_capabilities(hopper, dataclasses.replace(CAN, architectures=frozenset({80, 90}))).architectures == {90}


def test_sizes_and_requirements_are_joined():
    first = dataclasses.replace(
        PLAIN, page_sizes=OneOf({16, 32, 64}), requirements=(Requirement("a", "1", "x"), Requirement("b", "1", "y"))
    )
    second = dataclasses.replace(PLAIN, page_sizes=Span(32, 128, 32), requirements=(Requirement("b", "1", "y"),))
    shared = shared_capabilities(first, second)
    assert [size for size in range(200) if size in shared.page_sizes] == [32, 64]
    assert str(shared.page_sizes) == "both 16, 32, 64 and 32 to 128 in steps of 32"
    assert shared.head_dims == ANY_SIZE and [r.module for r in shared.requirements] == ["a", "b"]
    assert shared_capabilities(first, PLAIN).page_sizes == first.page_sizes == shared_capabilities(PLAIN, first).page_sizes


def test_pairs_of_dims_are_those_that_both_run():
    by_pair = dataclasses.replace(CAN, dim_pairs=frozenset({(192, 128), (64, 512)}))
    any_in_span = dataclasses.replace(CAN, features=frozenset({Feature.UNEQUAL_DIMS}), head_dims=Span(64, 256, 64))
    for first, second in ((by_pair, any_in_span), (any_in_span, by_pair)):
        assert shared_capabilities(first, second).dim_pairs == {(192, 128)}
    assert shared_capabilities(by_pair, CAN).dim_pairs == frozenset()
    assert shared_capabilities(by_pair, dataclasses.replace(CAN, dim_pairs=frozenset({(64, 512)}))).dim_pairs == {(64, 512)}
