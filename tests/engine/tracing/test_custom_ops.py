"""Custom ops without a fake run by themselves between the pieces; calls that only tell people something are not part of a graph."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paged_attn import LLM, SamplingParams, UnsupportedError
from tests.engine.runners.own_positions import PLACES, Decoder, greedy_loop
from tests.oracle import random_prompts

LIBRARY = torch.library.Library("paged_attn_tests", "DEF")
LIBRARY.define("doubled(Tensor x) -> Tensor")
LIBRARY.define("halves(Tensor x, Tensor y) -> (Tensor, Tensor)")
LIBRARY.define("fill(Tensor x, Tensor(a!) out) -> ()")
LIBRARY.define("largest(Tensor x) -> Tensor")


def fill(x: Tensor, out: Tensor) -> None:
    out.copy_(x.tanh())


LIBRARY.impl("doubled", lambda x: x * 2, "CPU")
LIBRARY.impl("halves", lambda x, y: ((x + y)[..., :8].contiguous(), (x - y)[..., 8:].contiguous()), "CPU")
LIBRARY.impl("fill", fill, "CPU")
LIBRARY.impl("largest", lambda x: x[x > x.mean()], "CPU")
OPS = torch.ops.paged_attn_tests


@torch.library.custom_op("paged_attn_tests::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    return x * 3


def halves(x: Tensor) -> Tensor:
    left, right = OPS.halves(x, x.flip(-1))
    return torch.cat((left, right), -1)


def filled(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    OPS.fill(x, out)
    return out


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "doubled": lambda x: OPS.doubled(x),
    "tripled": lambda x: OPS.tripled(x),
    "halves": halves,
    "fill": filled,
}


class Calling(Decoder):
    """The decoder with `call` on what it attends over."""

    def __init__(self, call: Callable[[Tensor], object]) -> None:
        super().__init__(PLACES["learned"][0])
        self.call, place = call, self.place
        self.place = lambda model, x: model.call(place(model, x))


@pytest.mark.parametrize("name", CALLS)
def test_a_custom_op_without_a_fake_is_a_break_by_itself(name: str) -> None:
    model, prompts = Calling(CALLS[name]).eval(), random_prompts((1, 5, 17, 33))
    with LLM(model, page_size=4, num_pages=80, max_batch_tokens=16) as llm:
        got = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=8))]
        split = llm.engine.runner.compiled.split
    assert got == [greedy_loop(model, prompt, 8) for prompt in prompts]
    assert split is not None
    if name == "fill":  # it only writes, of which torch knows what there is to know
        return
    assert f"paged_attn_tests::{name}" in split.ops
    with pytest.raises(RuntimeError):  # torch is told for the time of the trace only
        torch.compile(model, backend="eager", fullgraph=True)(torch.tensor([prompts[1]]))


def test_an_op_of_which_no_shape_can_be_told_is_refused_with_what_to_do() -> None:
    model = Calling(lambda x: x + 0 * OPS.largest(x).sum()).eval()
    words = r'largest has no fake .* it gives result 0 of shapes \[.*Say what it gives: @torch\.library\.register_fake\("paged_attn_tests'
    with pytest.raises(UnsupportedError, match=words):
        LLM(model, num_pages=20)


LOGGER = logging.getLogger("a.model")


def telling(x: Tensor) -> Tensor:
    LOGGER.warning("a call of %s tokens", x.shape[1])
    LOGGER.warning_once("said once")  # type: ignore[attr-defined]  # of transformers
    warnings.warn("a call", stacklevel=1)
    print("a call")
    return x


@pytest.mark.filterwarnings("ignore:a call")
def test_what_forward_tells_people_does_not_stop_the_trace() -> None:
    model, prompts = Calling(telling).eval(), random_prompts((5, 17))
    with LLM(model, page_size=4, num_pages=40, max_batch_tokens=16) as llm:
        got = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=4))]
    assert got == [greedy_loop(model, prompt, 4) for prompt in prompts]
