"""`LLM.stream`: every token once, in order, as it comes; closing at any time; other calls and threads in between."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from paged_attn import SamplingParams
from paged_attn.attn_ops.errors import ContextError
from paged_attn.engine.requests.outputs import Completion
from tests.engine.models import assert_nothing_left, bytes_tokenizer, make_llm, oracle, random_prompts, tiny, tokenizer
from tests.tiny_models import build

PROMPTS = random_prompts(0, 6, 19, 11)
GREEDY = SamplingParams(max_new_tokens=12)


def shown(tokens: PreTrainedTokenizerFast, completion: Completion) -> str:
    return str(tokens.decode(completion.token_ids, skip_special_tokens=True))


def test_tokens_come_with_the_index_of_their_prompt() -> None:
    llm = make_llm(max_batch_tokens=8, max_requests=2)
    events = list(llm.stream(PROMPTS, GREEDY))
    for i, prompt in enumerate(PROMPTS):
        mine = [e for e in events if e.index == i]
        assert [e.token_id for e in mine] == oracle(prompt)
        assert [e.finish_reason for e in mine] == [None] * 11 + ["length"]
        assert len({e.request_id for e in mine}) == 1
    assert len(events) == 36
    assert_nothing_left(llm)


def test_the_first_token_comes_before_the_last_is_computed() -> None:
    llm = make_llm(overlap=False)
    stream = llm.stream(PROMPTS[0], GREEDY)
    assert llm.engine.stats.steps == 0, "queued, not run"
    assert next(stream).token_id == oracle(PROMPTS[0])[0]
    assert llm.engine.stats.steps == 1
    stream.close()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_new_tokens=30, temperature=1.0, seed=3)])
def test_joined_pieces_are_the_text(params: SamplingParams) -> None:
    llm = make_llm(tokenizer=tokenizer(), max_batch_tokens=8)
    events = list(llm.stream(["some text", *PROMPTS], params))
    for i, completion in enumerate(llm.generate(["some text", *PROMPTS], params)):
        assert "".join(e.text for e in events if e.index == i) == completion.text == shown(tokenizer(), completion)


def test_joined_pieces_of_bytes_are_the_text() -> None:
    """A model whose tokens are bytes: most of what it says is not valid UTF-8, and characters take up to four tokens."""
    llm = make_llm(build("qwen3", vocab_size=257), bytes_tokenizer())
    prompts = ["naïve café", "日本語", "🙂"]
    params = SamplingParams(max_new_tokens=60, temperature=1.0, seed=1)
    events = list(llm.stream(prompts, params))
    for i, completion in enumerate(llm.generate(prompts, params)):
        assert completion.prompt_token_ids == bytes_tokenizer()(prompts[i]).input_ids
        assert "".join(e.text for e in events if e.index == i) == completion.text == shown(bytes_tokenizer(), completion)


def test_no_piece_shows_the_beginning_of_a_stop_string() -> None:
    llm = make_llm(tokenizer=tokenizer())
    text = tokenizer().decode(oracle(PROMPTS[1], 20))
    stop = text[8:12]
    events = list(llm.stream(PROMPTS[1], SamplingParams(max_new_tokens=20, stop=stop)))
    assert "".join(e.text for e in events) == text[: text.index(stop)]
    assert [e.finish_reason for e in events] == [None] * (len(events) - 1) + ["stop"]
    assert_nothing_left(llm)


def test_what_a_stop_string_held_back_comes_with_the_last_event() -> None:
    llm = make_llm(tokenizer=tokenizer())
    text = tokenizer().decode(oracle(PROMPTS[1]))
    events = list(llm.stream(PROMPTS[1], SamplingParams(max_new_tokens=12, stop=text[-3:] + "x")))
    assert "".join(e.text for e in events) == text and events[-1].text == text[-3:]


def test_logprobs_come_with_their_token() -> None:
    llm = make_llm()
    params = SamplingParams(max_new_tokens=4, logprobs=2)
    events = list(llm.stream(PROMPTS[0], params))
    (completion,) = make_llm().generate(PROMPTS[0], params)
    assert completion.logprobs is not None
    for event, best in zip(events, completion.logprobs, strict=True):
        assert event.top_logprobs is not None and dict(event.top_logprobs) == pytest.approx(best)
        assert event.logprob == pytest.approx(best[event.token_id or 0])


def test_a_request_for_no_tokens_ends_with_one_event() -> None:
    events = list(make_llm().stream(PROMPTS, [GREEDY, SamplingParams(max_new_tokens=0), GREEDY]))
    assert [(e.token_id, e.text, e.finish_reason) for e in events if e.index == 1] == [(None, "", "length")]
    assert len(events) == 25


@pytest.mark.parametrize("read", [0, 1, 2, 7, 20, 36])
def test_closing_early_cancels_the_rest(read: int) -> None:
    llm = make_llm(max_batch_tokens=8, max_requests=2)
    stream = llm.stream(PROMPTS, GREEDY)
    for _ in range(read):
        next(stream)
    stream.close()
    assert list(stream) == []
    assert_nothing_left(llm)
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [oracle(p) for p in PROMPTS]


def test_a_stream_whose_llm_is_closed_says_so() -> None:
    llm = make_llm(overlap=False)
    stream = llm.stream(PROMPTS[:2], SamplingParams(max_new_tokens=40))
    first = next(stream)
    llm.close()
    *between, one, other = stream
    assert all(event.finish_reason is None for event in (first, *between))
    assert [(event.index, event.token_id, event.finish_reason) for event in (one, other)] == [
        (0, None, "cancelled"),
        (1, None, "cancelled"),
    ]


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_what_is_closed_gives_its_memory_back_and_says_so(name: str) -> None:
    with make_llm(tiny(name)) as llm:
        llm.generate(PROMPTS, GREEDY)
        assert llm.engine.pool.storage.untyped_storage().nbytes() > 0
    llm.close()
    assert llm.engine.pool.storage.untyped_storage().nbytes() == 0
    for ask in (llm.generate, llm.stream):
        with pytest.raises(ContextError, match="this LLM was closed"):
            ask(PROMPTS, GREEDY)
    with make_llm(tiny(name)) as another:  # of the same model
        assert [c.token_ids for c in another.generate(PROMPTS, GREEDY)] == [oracle(p, model=tiny(name)) for p in PROMPTS]


def test_on_a_gpu_the_driver_gets_the_memory_back_when_no_step_writes_there_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next engine of the process divides what the driver calls free; what torch keeps for itself would be lost to it."""
    llm, seen = make_llm(), list[tuple[str, bool]]()
    held = llm.engine.pool.storage.untyped_storage()
    monkeypatch.setattr(llm.engine, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append(("wait", held.nbytes() > 0)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(("give back", held.nbytes() > 0)))
    llm.close()
    assert seen == [("wait", True), ("give back", False)]


@pytest.mark.parametrize("read", [0, 3])
def test_dropping_the_iterator_cancels_too(read: int) -> None:
    llm = make_llm()
    stream = llm.stream(PROMPTS, GREEDY)
    for _ in range(read):
        next(stream)
    del stream
    gc.collect()
    assert_nothing_left(llm)


def test_prompts_are_checked_at_the_call_and_none_is_queued_if_one_is_bad() -> None:
    llm = make_llm()
    with pytest.raises(ValueError, match="the prompt is empty") as raised:
        llm.stream([PROMPTS[0], []], GREEDY)
    assert raised.value.__notes__ == ["(prompt 2 of 2)"]
    assert_nothing_left(llm)


def test_generate_and_a_second_stream_while_a_stream_is_open() -> None:
    llm = make_llm(max_batch_tokens=8)
    first = llm.stream(PROMPTS[:2], GREEDY)
    seen = [next(first) for _ in range(3)]
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [oracle(p) for p in PROMPTS]
    second = llm.stream(PROMPTS[2], GREEDY)
    third = [next(second).token_id for _ in range(2)]
    seen += first
    third += [event.token_id for event in second]
    assert third == oracle(PROMPTS[2])
    for i in range(2):
        assert [e.token_id for e in seen if e.index == i] == oracle(PROMPTS[i])
    assert_nothing_left(llm)


def test_a_stream_left_open_while_others_finish_it_loses_nothing() -> None:
    llm = make_llm()
    stream = llm.stream(PROMPTS[0], GREEDY)
    llm.generate(PROMPTS[1], SamplingParams(max_new_tokens=40))  # runs the stream's request to its end as well
    steps = llm.engine.stats.steps
    assert [event.token_id for event in stream] == oracle(PROMPTS[0])
    assert llm.engine.stats.steps == steps


def test_the_last_tokens_are_not_lost_when_another_thread_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread ends the request at the worst moment: after the stream has read its inbox."""
    llm = make_llm()
    stream = llm.stream(PROMPTS[0], GREEDY)
    seen = [next(stream).token_id]
    raise_errors = llm._raise_errors

    def finish_meanwhile(requests) -> None:
        while llm.engine.has_work:
            llm._step()
        raise_errors(requests)

    monkeypatch.setattr(llm, "_raise_errors", finish_meanwhile)
    assert seen + [event.token_id for event in stream] == oracle(PROMPTS[0])


def test_close_ends_open_streams() -> None:
    llm = make_llm()
    stream = llm.stream(PROMPTS, GREEDY)
    seen = [next(stream) for _ in range(4)]
    llm.close()
    assert len(seen) + len(list(stream)) < 36
    assert_nothing_left(llm)
    with pytest.raises(ContextError, match="this LLM was closed"):
        llm.generate(PROMPTS, GREEDY)


def test_the_object_is_a_context_manager() -> None:
    with make_llm() as llm:
        llm.generate(PROMPTS, GREEDY)
        assert llm.engine.kv.tree is not None and llm.engine.kv.tree.num_pages > 0
    assert llm.engine.kv.allocator.num_free == llm.engine.kv.num_usable


def test_threads_that_stream_generate_and_close_early() -> None:
    llm = make_llm(max_batch_tokens=16, max_requests=3, num_pages=40)
    failures: list[str] = []

    def check(condition: bool, what: str) -> None:
        if not condition:
            failures.append(what)

    def streams(seed: int) -> None:
        for prompt in random_prompts(seed, 5, 21, 2, 13):
            check([e.token_id for e in llm.stream(prompt, GREEDY)] == oracle(prompt), f"stream {seed}")

    def quits(seed: int) -> None:
        for prompt in random_prompts(seed, 5, 21, 2, 13):
            stream = llm.stream(prompt, GREEDY)
            check([next(stream).token_id for _ in range(3)] == oracle(prompt)[:3], f"early {seed}")
            stream.close()  # type: ignore[attr-defined]

    def generates(seed: int) -> None:
        prompts = random_prompts(seed, 5, 21, 2, 13)
        check([c.token_ids for c in llm.generate(prompts, GREEDY)] == [oracle(p) for p in prompts], f"generate {seed}")

    for seed in range(30, 36):  # what the models say is worked out before the threads run
        for prompt in random_prompts(seed, 5, 21, 2, 13):
            oracle(prompt)
    work = [streams, quits, generates]
    threads = [threading.Thread(target=work[i % 3], args=(30 + i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures
    assert_nothing_left(llm)
