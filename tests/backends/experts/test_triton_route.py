"""The routing kernel beside `Routing`: every score, groups, bias, ties, and rows without numbers."""

from __future__ import annotations

import pytest
import torch

from paged_attn.attn_ops.specs.routing import Routing

pytest.importorskip("triton")
from paged_attn.backends.experts.triton.route import route

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUTINGS = {
    "softmax": (Routing(3), 12),
    "softmax, renormalised": (Routing(8, renormalise=True), 128),
    "of logits, then softmax": (Routing(4, "none", "softmax"), 32),
    "of logits, then sigmoid": (Routing(1, "none", "sigmoid"), 16),
    "sigmoid, groups by their best two": (Routing(8, "sigmoid", "none", 8, 4, 2, renormalise=True, eps=1e-20, scale=2.5), 256),
    "softmax, groups by their best": (Routing(6, "softmax", "none", 8, 3, 1, hidden=0.0, scale=16.0), 160),
    "one group more than a power of 2": (Routing(4, "sigmoid", "none", 3, 2, 2), 21),
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_it_chooses_and_weighs_as_the_spec(name: str, biased: bool) -> None:
    routing, experts = ROUTINGS[name]
    numbers = torch.Generator().manual_seed(0)
    logits = (torch.randn(17, experts, generator=numbers) * 3).to(DEVICE)
    bias = torch.rand(experts, generator=numbers).to(DEVICE) if biased else None
    expected, wanted = routing(logits, bias)
    given = route(logits, bias, routing, torch.float32)
    assert given is not None
    weights, ids = given
    assert torch.equal(ids.sort(1).values, wanted.sort(1).values)
    torch.testing.assert_close(weights.gather(1, ids.argsort(1)), expected.gather(1, wanted.argsort(1)), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "dtype", [*[torch.bfloat16] * (DEVICE == "cuda"), torch.float16]
)  # the interpreter cuts off what bf16 does not hold
@pytest.mark.parametrize("wide_bias", [False, True])
def test_scores_in_16_bits(dtype: torch.dtype, wide_bias: bool) -> None:
    """They choose other experts than scores in float32 do; where they are equal, any of them."""
    numbers, routing = torch.Generator().manual_seed(0), Routing(4, "sigmoid", renormalise=True, rounded=True)
    logits = (torch.randn(256, 32, generator=numbers) * 0.01).to(DEVICE, dtype)
    bias = (torch.rand(32, generator=numbers) * 0.01).to(DEVICE, torch.float32 if wide_bias else dtype)
    choice, exact = (logits.sigmoid() + bias).float(), logits.float().sigmoid() + bias
    wanted = choice.topk(4).values
    given = route(logits, bias, routing, torch.float32)
    assert given is not None
    as_chosen, as_exact = (
        choice.gather(1, ids).sort(descending=True).values.eq(wanted).all(1) for ids in (given[1], exact.topk(4).indices)
    )
    assert as_chosen.sum() >= 250 > as_exact.sum()  # a score that lies between two numbers of 16 bits may fall to the other one
    expected, ids = routing(logits, bias)
    alike = (ids == given[1]).all(1)
    assert alike.any() and torch.allclose(given[0][alike], expected[alike], rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_equals_the_first_is_chosen(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0, 2, 1, 2, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1, 1, 1]], dtype=dtype, device=DEVICE)
    given = route(logits, None, Routing(4), dtype)
    assert given is not None and given[0].dtype == dtype
    assert given[1].tolist() == [[1, 3, 2, 4], [0, 1, 2, 3]]


def test_a_group_with_an_expert_that_is_shut_is_still_one_of_the_best() -> None:
    """-inf is the score of such a group, and of those that were taken."""
    shut = -torch.inf
    logits = torch.tensor([[0.0, shut, 1.0, shut, 2.0, shut], [shut, shut, 3.0, 1.0, shut, 2.0]], device=DEVICE)
    routing = Routing(3, "none", groups=3, top_groups=3, group_best=2)
    given, (_, wanted) = route(logits, None, routing, torch.float32), routing(logits, None)
    assert given is not None and given[1].tolist() == wanted.tolist() == [[4, 2, 0], [2, 5, 3]]


@pytest.mark.parametrize("experts", [12, 16])
def test_rows_without_numbers_get_experts_that_exist_and_harm_nobody(experts: int) -> None:
    logits = torch.randn(3, experts, device=DEVICE)
    expected = route(logits, None, Routing(2), torch.float32)
    poisoned = logits.clone()
    poisoned[1] = float("nan")
    given = route(poisoned, None, Routing(2), torch.float32)
    assert given is not None and expected is not None
    assert ((given[1] >= 0) & (given[1] < experts)).all()
    assert torch.equal(given[1][::2], expected[1][::2]) and torch.equal(given[0][::2], expected[0][::2])


def test_a_slice_of_more_logits() -> None:
    wide = torch.randn(5, 40, device=DEVICE)
    logits, routing = wide[:, 8:24], Routing(2, renormalise=True)
    given, expected = route(logits, None, routing, torch.float32), routing(logits, None)
    assert given is not None and torch.equal(given[1], expected[1])
    torch.testing.assert_close(given[0], expected[0])


def test_more_experts_than_a_program_holds_are_left_to_torch() -> None:
    assert route(torch.randn(1, 2048, device=DEVICE), None, Routing(2), torch.float32) is None


@pytest.mark.parametrize(
    "routing", [Routing(3, "sigmoid", renormalise=True), Routing(3, "none", "softmax"), Routing(4, "sigmoid", "none", 4, 1, 1)]
)
def test_no_expert_is_chosen_twice_where_fewer_are_to_be_had(routing):
    """Experts that a bias or the router itself rules out, or groups of fewer than are chosen; which of the others come is a tie."""
    hidden = torch.tensor([0.0, *[float("-inf")] * 3, 0.0, *[float("-inf")] * 3]).to(DEVICE)
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for given, bias in ((logits + hidden, None), (logits, hidden)):
        routed, (expected, _) = route(given, bias, routing, torch.float32), routing(given, bias)
        assert routed is not None
        weights, ids = routed
        assert all(len(set(row)) == routing.top_k for row in ids.tolist())
        if routing.groups == 1 and bias is None:
            torch.testing.assert_close(weights.sort(1).values, expected.sort(1).values)
