"""What may not come next: as transformers' own processors have it, and the same whether the host knows the last token or not."""

from __future__ import annotations

import random

import pytest
import torch
from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor, NoBadWordsLogitsProcessor

from paged_attn.engine.sampling.forbidden import BadWords, Forbidden, ForbiddenNext, bad_words, forbid
from paged_attn.engine.sampling.sampling_state import SamplingState
from paged_attn.engine.sampling_params import SamplingParams
from tests.sample_once import Chooser

VOCAB, STEPS = 6, 40


def random_words(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB - 1) for _ in range(rng.choice((2, 2, 3, 4)))] for _ in range(12)]  # the last token is always allowed


@pytest.mark.parametrize("late", [False, True])
def test_it_forbids_what_transformers_forbids(late: bool) -> None:
    """`late`: a token comes to the host when the next one has been chosen, as when steps overlap."""
    words, ends = [random_words(seed) for seed in range(4)], [5, 5, 4, 4]
    states = [
        SamplingState(SamplingParams(), [1, 2, 3], None, Forbidden([end], 7 + row, BadWords(words[row]))) for row, end in enumerate(ends)
    ]
    seen, sampler, under_way = [[1, 2, 3] for _ in states], Chooser(), None
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        logits = torch.randn(len(states), VOCAB, generator=generator)
        want = []
        for row, end in enumerate(ends):
            ids, scores = torch.tensor([seen[row]]), logits[row : row + 1].clone()
            for processor in (NoBadWordsLogitsProcessor(words[row]), MinNewTokensLengthLogitsProcessor(3, 7 + row, end)):
                scores = processor(ids, scores)
            want.append(int(scores.argmax()))
        chosen = sampler.choose(logits, dict(enumerate(states)))
        assert chosen.wait().ids == want, f"step {step}"
        came = under_way if late else want
        for row, state in enumerate(states):
            seen[row].append(want[row])
            if came is not None:
                state.tokens.append(came[row])
        under_way = want


def test_words_are_found_by_what_precedes_their_last_token() -> None:
    words = BadWords([[1], [2, 3], [2, 4], [7, 2, 5], [2, 3]])
    assert words.single == [1] and words.next([9, 2]) == [1, 3, 4] and words.next([7, 2]) == [1, 3, 4, 5] and words.next([]) == [1]
    assert words.next_but_one([7]) == [(2, 3), (2, 4), (2, 5)] and words.next_but_one([]) == [(2, 3), (2, 4)]


def test_two_words_with_one_last_token_in_a_row() -> None:
    """Their places in the scores are the same, and each counts."""
    scores = torch.zeros(2, 4)
    forbid(scores, {1: ForbiddenNext([0], [(5, 3), (6, 3), (7, 2)])}, torch.tensor([9, 6]), {1: 1})
    assert scores.tolist() == [[0, 0, 0, 0], [-torch.inf, 0, 0, -torch.inf]]
    forbid(scores, {0: ForbiddenNext([99], [])}, None, {})  # no token of this vocabulary
    assert scores[0].tolist() == [0, 0, 0, 0]


def test_a_text_is_meant_with_and_without_a_space() -> None:
    def tokenizer(text: str, add_special_tokens: bool) -> object:
        assert not add_special_tokens
        return type("Encoded", (), {"input_ids": [len(text), *map(ord, text)]})

    words = bad_words(["ab", (7, 8)], tokenizer)
    assert words.next([2, ord("a")]) == [ord("b")] and words.next([3, ord(" "), ord("a")]) == [ord("b")] and words.next([7]) == [8]


def test_a_tokenizer_that_reads_no_text_is_the_fault_of_the_request() -> None:
    """In the engine's thread anything but a ValueError would end all requests."""

    def tokenizer(text: str, add_special_tokens: bool) -> object:
        return {"no": "vocabulary"}[text]

    with pytest.raises(ValueError, match="bad_words: got 'ab', which the tokenizer does not read: it raised KeyError: 'ab'; give lists"):
        bad_words(["ab"], tokenizer)


def test_it_holds_no_longer_than_it_must() -> None:
    state = SamplingState(SamplingParams(), [], None, Forbidden([1], 2, None))
    assert state.edits_logits and not state.is_greedy_only and not state.is_argmax_only
    state.num_chosen = 2
    assert not state.edits_logits and state.is_greedy_only and not state.is_argmax_only and state.forbidden_next is None
