"""Tokens that may not come next: those that would end a request before `min_tokens`, or complete one of its `bad_words`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_attn.attn_ops.batch.packed_ints import PackedInts
from paged_attn.attn_ops.model_code import model_code
from paged_attn.shown import shown


class ForbiddenNext(NamedTuple):
    """Tokens that may not come next, and pairs (before, token): `token` may not come if the pending token is `before`."""

    tokens: list[int]
    pairs: list[tuple[int, int]]


class BadWords:
    """Non-empty sequences of tokens that may not be generated, indexed by what precedes their last token. `single`: tokens that may never
    be generated."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self.single: list[int] = []
        self._after: dict[int, dict[tuple[int, ...], list[int]]] = {}  # length of the beginning -> beginning -> last tokens
        self._after_next: dict[int, dict[tuple[int, ...], list[tuple[int, int]]]] = {}  # the same, of the last two tokens
        for *start, last in dict.fromkeys(map(tuple, sequences)):
            if not start:
                self.single.append(last)
                continue
            self._after.setdefault(len(start), defaultdict(list))[tuple(start)].append(last)
            *start, before = start
            self._after_next.setdefault(len(start), defaultdict(list))[tuple(start)].append((before, last))

    def next(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that may not follow `tokens`."""
        return [*self.single, *(last for found in _found(self._after, tokens) for last in found)]

    def next_but_one(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Pairs of a token that may come next and a token that may not follow it then; without `single`."""
        return [pair for found in _found(self._after_next, tokens) for pair in found]


def _found(table: Mapping[int, Mapping[tuple[int, ...], Any]], tokens: Sequence[int]) -> list[Any]:
    starts = [(of_length, tuple(tokens[len(tokens) - length :])) for length, of_length in table.items() if length <= len(tokens)]
    return [of_length[start] for of_length, start in starts if start in of_length]


class Forbidden:
    """The tokens that one request may not generate.

    Args:
        end: tokens that are forbidden until there are `min_tokens` new ones.
        words: sequences that are always forbidden.
    """

    def __init__(self, end: Collection[int], min_tokens: int, words: BadWords | None) -> None:
        self.end, self.min_tokens, self.words = end, min_tokens, words

    def holds(self, num_chosen: int) -> bool:
        """Whether anything may be forbidden after so many new tokens."""
        return self.words is not None or num_chosen < self.min_tokens

    def next(self, tokens: Sequence[int], num_chosen: int, num_pending: int) -> ForbiddenNext:
        """After the known tokens, prompt included, of which `num_chosen` are new with those `num_pending` (one at most)."""
        ends = list(self.end) if num_chosen < self.min_tokens else []
        if self.words is None:
            return ForbiddenNext(ends, [])
        assert 0 <= num_pending <= 1, f"{num_pending} tokens are pending"
        if num_pending:
            return ForbiddenNext([*ends, *self.words.single], self.words.next_but_one(tokens))
        return ForbiddenNext([*ends, *self.words.next(tokens)], [])


def bad_words(words: Iterable[str | Sequence[int]], tokenizer: Any) -> BadWords:
    """Texts as the tokenizer writes them, with and without a space in front; ids as they are. Raises ValueError: a text, and there is no
    tokenizer, or it does not read it."""
    sequences: list[Sequence[int]] = []
    for word in words:
        if not isinstance(word, str):
            sequences.append(word)
            continue
        if tokenizer is None:
            raise ValueError("bad_words: got a text, and there is no tokenizer; give LLM(model, tokenizer=...), or lists of token ids")
        sequences += _read(word, tokenizer)
    return BadWords(filter(None, sequences))


def _read(word: str, tokenizer: Any) -> list[Sequence[int]]:
    """With and without a space in front."""

    def unread(why: str) -> ValueError:
        return ValueError(f"bad_words: got {shown(word)}, which the tokenizer does not read: it raised {why}; give lists of token ids")

    with model_code(unread):
        return [tokenizer(text, add_special_tokens=False).input_ids for text in (word.lstrip(), " " + word.lstrip())]


def forbid(scores: Tensor, rows: Mapping[int, ForbiddenNext], last: Tensor | None, last_rows: Mapping[int, int]) -> None:
    """Set the scores [N, V] float32 of forbidden tokens to -inf in place, by row. Does not wait for the device. `last`: [M] int64, the
    tokens chosen last, on the device; `last_rows`: the index in it of each row's pending token."""
    vocabulary = scores.shape[-1]
    always: list[int] = []
    follows: list[tuple[int, int, int]] = []  # element of the scores, row of `last`, token there
    for row, (tokens, pairs) in rows.items():
        always += [row * vocabulary + token for token in tokens if token < vocabulary]
        follows += [(row * vocabulary + token, last_rows[row], before) for before, token in pairs if token < vocabulary]
    if not always and not follows:
        return
    packed = PackedInts((len(always), *(len(follows),) * 3), (), scores.device)
    packed.host[0][:] = always
    for memory, values in zip(packed.host[1:], zip(*follows, strict=True), strict=False):
        memory[:] = values
    everywhere, elements, rows_of_last, before_on = packed.to_device()
    flat = scores.view(-1)
    flat.index_fill_(0, everywhere, -torch.inf)
    if follows:
        assert last is not None
        is_that = last.index_select(0, rows_of_last) == before_on
        flat.index_add_(0, elements, torch.zeros_like(elements, dtype=flat.dtype).masked_fill_(is_that, -torch.inf))  # elements may repeat


def allow_only(scores: Tensor, allowed: Mapping[int, NDArray[np.int64]]) -> None:
    """scores [N, V] float32, in place: -inf for all but these tokens in some rows. Ids past the vocabulary allow nothing. Nothing waits for
    the device."""
    vocabulary = scores.shape[-1]
    kept_in = np.concatenate([row * vocabulary + tokens[tokens < vocabulary] for row, tokens in allowed.items()])
    packed = PackedInts((len(allowed), len(kept_in)), (), scores.device)
    packed.host[0][:] = list(allowed)
    packed.host[1][:] = kept_in
    of_rows, elements = packed.to_device()
    flat = scores.view(-1)
    kept = flat.index_select(0, elements)
    scores.index_fill_(0, of_rows, -torch.inf)
    flat.index_copy_(0, elements, kept)
