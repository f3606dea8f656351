"""Priority on its way from the calls to the scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from paged_attn import SamplingParams
from tests.engine.models import make_engine, make_llm, oracle, random_prompts


def test_the_more_urgent_request_ends_first_and_tokens_stay_right() -> None:
    engine = make_engine(max_requests=1, overlap=False)
    prompts = random_prompts(5, 6, 7, 8)
    requests = [
        engine.add_request(p, SamplingParams(max_new_tokens=4, ignore_eos=True), priority=v)
        for p, v in zip(prompts, (1, 0, -1), strict=True)
    ]
    ended: list[str] = []
    while engine.has_work:
        ended += [event.request_id for event in engine.step() if event.finish_reason]
    assert ended == [request.id for request in reversed(requests)]
    assert [r.output_token_ids for r in requests] == [oracle(prompt, 4) for prompt in prompts]


@pytest.mark.parametrize("priority", [None, "high", 1.0, True])
def test_a_priority_that_is_no_whole_number_is_refused(priority: Any) -> None:
    engine = make_engine()
    with pytest.raises(TypeError, match="a lower one is more urgent"):
        engine.add_request([1], priority=priority)
    assert not engine.has_work


def test_llm_hands_it_on() -> None:
    llm = make_llm()
    llm.generate([1, 2], SamplingParams(max_new_tokens=1), priority=0)
    for call in (llm.generate, llm.stream):
        with pytest.raises(TypeError, match="priority is 'high'"):
            call([1, 2], priority="high")
