"""The sequence of events that a step returns."""

from __future__ import annotations

import pytest

from paged_attn import SamplingParams
from paged_attn.engine.requests.outputs import TokenEvent, TokenEvents
from tests.engine.models import make_engine, random_prompts, run_all, tokenizer

LISTED = [TokenEvent("a", 5, ""), TokenEvent("b", 6, "text", "stop", -0.5), TokenEvent("a", 7, ""), TokenEvent("c", None, "", "length")]


def told(events: list[TokenEvent] = LISTED) -> TokenEvents:
    made = TokenEvents()
    for event in events:
        if event == TokenEvent(event.request_id, event.token_id, "") and event.token_id is not None:
            made.append((event.request_id, event.token_id))
        else:
            made.append(event)
    return made


def test_they_are_those_of_a_list() -> None:
    events = told()
    assert len(events) == 4 and events and not TokenEvents()
    assert events == LISTED and LISTED == events and events == told() and [] == TokenEvents() and TokenEvents() == []
    assert events != LISTED[:3] and events != told(LISTED[1:]) and told(LISTED[:3]) != [*LISTED[:2], TokenEvent("a", 8, "")] and events != 4
    assert list(told()) == LISTED == [told()[index] for index in range(4)] and told()[-1] == LISTED[-1] and told()[1:3] == LISTED[1:3]
    assert [*LISTED, *events] == [*events, *LISTED] and repr(told()) == repr(LISTED) and LISTED[2] in told()
    assert list(reversed(told())) == LISTED[::-1] and told() + LISTED == LISTED + told() == told() + told() == LISTED * 2
    with pytest.raises(IndexError):
        told()[4]


def test_what_was_read_stays_the_same_object_while_more_come() -> None:
    events = told()
    first = events[0]
    first.index = 3  # as `LLM.stream` does
    events.append(("d", 1))
    events.append(LISTED[1])
    assert events[0] is first and [event.index for event in events] == [3, -1, -1, -1, -1, -1]
    assert events[4:] == [TokenEvent("d", 1, ""), LISTED[1]] and len(events) == 6


def test_those_of_one_request_are_taken_away() -> None:
    assert (
        told().without("a") == [LISTED[1], LISTED[3]]
        and told().without("x") == LISTED
        and told().without("b") == told([*LISTED[:1], *LISTED[2:]])
    )


@pytest.mark.parametrize("overlap", [True, False])
def test_what_nobody_streams_is_told_as_what_somebody_does(overlap: bool) -> None:
    prompts, ended = random_prompts(0, 6, 19, 11), []
    for text_at_end in (False, True):
        engine = make_engine(tokenizer=tokenizer(), overlap=overlap)
        for index, prompt in enumerate(prompts):
            params = SamplingParams(max_new_tokens=9 + index, ignore_eos=True)
            engine.add_request(prompt, params, request_id=str(index), text_at_end=text_at_end)
        events = run_all(engine)
        ended.append([(event.request_id, event.token_id, event.finish_reason) for event in events])
        texts = ["".join(event.text for event in events if event.request_id == str(index)) for index in range(3)]
        assert texts == [tokenizer().decode([e.token_id for e in events if e.request_id == str(i)]) for i in range(3)]
    assert ended[0] == ended[1] and len(ended[0]) == 30
