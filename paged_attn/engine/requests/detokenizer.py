"""Turns tokens into text as they arrive, never emitting half a character or the beginning of a stop string."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

from paged_attn.shown import shown

REPLACEMENT = "\ufffd"
MAX_INCOMPLETE = 3  # a cut-off UTF-8 character decodes to one U+FFFD (byte-level) or one per byte (byte fallback)
MAX_WINDOW = 32  # tokens without a clean boundary (invalid UTF-8), after which the window is cut anyway
CUT_WINDOW = 12  # tokens kept; enough bytes for a UTF-8 decoder to resynchronize


class TokenDecoder(Protocol):
    """A `transformers` tokenizer or a `tokenizers.Tokenizer`."""

    def decode(self, token_ids: Any, /, *, skip_special_tokens: bool) -> Any: ...


# Beginnings of what transformers' `clean_up_tokenization` shortens, such as " ." or " n ' t", longest first; and a "'" that it has moved to
# the word in front of it, as long as it does not know what follows.
UNCLEANED = (" n '", " n'", " 'v", " 'r", " n", " '", " ", "'")


def direct_decoder(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` beneath a tokenizer whose `decode` gives what that one does: each token of a stream is decoded twice, and
    transformers' layers above take three times as long as the decoding. Any other tokenizer as it is."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer
    used, known = (tokenizer.decode, tokenizer._decode), (PreTrainedTokenizerBase.decode, PreTrainedTokenizerFast._decode)
    if tuple(getattr(each, "__func__", None) for each in used) != known or _cleans_up(tokenizer):
        return tokenizer
    return tokenizer.backend_tokenizer


def _cleans_up(tokenizer: Any) -> bool:
    """Whether its `decode` takes out spaces; transformers heeds `clean_up_tokenization_spaces` for some models of tokens only."""
    probe = copy.copy(tokenizer)
    probe.clean_up_tokenization = lambda text: f"{text}."
    return bool(probe.decode([]) != tokenizer.decode([]))


class MarkedDecoder:
    """A `TokenDecoder` that keeps some special tokens in the text that its tokenizer would skip. `kept`: ids of these special tokens.
    `clean_up_tokenization_spaces`: spaces may be taken out of the text when it goes on."""

    def __init__(self, tokenizer: Any, kept: frozenset[int]) -> None:
        self._decoder = direct_decoder(tokenizer)
        self.clean_up_tokenization_spaces = _may_clean_up(self._decoder)
        self._skipped = special_ids(tokenizer) - kept

    def decode(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        if skip_special_tokens:
            token_ids = [token for token in token_ids if token not in self._skipped]
        text: str = self._decoder.decode(token_ids, skip_special_tokens=False)
        return text


def _may_clean_up(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))


def special_ids(tokenizer: Any) -> frozenset[int]:
    """All tokens that a tokenizer skips when it decodes without special tokens."""
    added = {id for id, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    return frozenset(added.union(tokenizer.all_special_ids))


class WholeText:
    """One request's output text, decoded when it ends: for requests that do not stream and have no stop strings.

    Has the interface of an `IncrementalDetokenizer` whose pieces are all empty except the last.

    Args:
        tokenizer: anything with `decode(ids, skip_special_tokens=...)`; None gives empty text.
        token_ids: the request's own list, which grows; now it holds the prompt.
        skip_special_tokens: leave special tokens out of the text.
    """

    stopped: str | None = None

    def __init__(self, tokenizer: TokenDecoder | None, token_ids: list[int], skip_special_tokens: bool = True) -> None:
        self.text = ""
        self._tokenizer, self._token_ids, self._num_prompt = tokenizer, token_ids, len(token_ids)
        self._skip_special_tokens = skip_special_tokens
        self._finished = False

    def append(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        """The text of all tokens; a second call returns an empty string."""
        token_ids = self._token_ids[self._num_prompt :]
        if self._tokenizer is None or not token_ids or self._finished:
            return ""
        self._finished = True
        self.text = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return self.text


class IncrementalDetokenizer:
    """One request's output text, as it grows.

    Without stop strings the returned pieces join to `tokenizer.decode(all_ids, skip_special_tokens=...)`, for
    byte-level and for sentencepiece-like tokenizers. (Only byte fallback turns characters back into U+FFFD when an
    invalid byte follows them; released text stays.) Each token decodes a short window, never the whole text.
    What a tokenizer with `clean_up_tokenization_spaces` may still shorten is held back.

    Args:
        tokenizer: anything with `decode(ids, skip_special_tokens=...)`; None gives empty text always.
        stop: non-empty strings. The first to be complete ends the text just before it; if several are complete at the same
            character, the longest counts. How the text is split into tokens makes no difference.
        skip_special_tokens: leave special tokens out of the text.
        include_stop: the text ends just after the stop string.
        min_tokens: a stop string that is complete before there are this many tokens is ordinary text.

    Raises:
        ValueError: an empty stop string, or stop strings without a tokenizer.

    Source: the prefix and read offsets of text-generation-inference (`Model.decode_token`).
    """

    def __init__(
        self,
        tokenizer: TokenDecoder | None,
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        if isinstance(stop, str) or not all(stop):
            raise ValueError(f"stop: got {shown(stop)}; allowed: a tuple of non-empty strings; SamplingParams.stop is one")
        if stop and tokenizer is None:
            raise ValueError(f"stop: got {shown(stop)} without a tokenizer; allowed: (); use stop_token_ids or pass one")
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._cleans_up = _may_clean_up(tokenizer)
        self._stop = tuple(stop)
        self._skip_special_tokens = skip_special_tokens
        self._include_stop, self._tokens_before_stop = include_stop, min_tokens
        self._window: list[int] = []  # the tokens decoded again each time; earlier tokens are not needed any more
        self._boundary = 0  # how many tokens of the window ended in a complete character
        self._window_text = ""
        self._num_inert = 0  # tokens at the end of the window that gave no text; they may be parts of a character
        self._passed = 0  # characters of the window's text that went on to the stop search
        self._held = ""  # text that may begin a stop string
        self._released: list[str] = []
        self._finished = False

    @property
    def text(self) -> str:
        """All text released so far."""
        if len(self._released) > 1:
            self._released = ["".join(self._released)]
        return self._released[0] if self._released else ""

    def append(self, token_id: int) -> str:
        """Take the next token; returns the text that can be shown now, often empty.

        Raises RuntimeError after a stop string was hit or after `finish`.
        """
        if self._finished or self.stopped is not None:
            reason = "finish() was called" if self._finished else f"stop string {self.stopped!r} was hit"
            raise RuntimeError(f"append: got token {token_id} after {reason}; allowed: none; make a new detokenizer")
        if self._tokenizer is None:
            return ""
        self._tokens_before_stop -= 1
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == self._window_text and self._is_inert(token_id):
            self._num_inert += 1
            if self._num_inert > CUT_WINDOW:
                del self._window[-self._num_inert]
                self._num_inert = CUT_WINDOW
            return ""
        self._window_text, self._num_inert = text, 0
        invalid = len(self._window) > MAX_WINDOW
        doubtful = len(text) - len(text.rstrip(REPLACEMENT))
        stable = len(text) - (min(doubtful, MAX_INCOMPLETE) if invalid else doubtful)
        if self._cleans_up:
            stable -= next((len(part) for part in UNCLEANED if text.endswith(part, 0, stable)), 0)
        fresh = text[self._passed : stable]
        self._passed = max(self._passed, stable)
        if fresh and not doubtful:
            self._restart_window(self._boundary)
            self._boundary = len(self._window)
        elif invalid:
            self._restart_window(len(self._window) - CUT_WINDOW)
            self._boundary = 0
        return self._release(fresh)

    def finish(self) -> str:
        """No more tokens: returns what was held back. A second call returns an empty string."""
        if self._finished or self.stopped is not None:
            self._finished = True
            return ""
        self._finished = True
        released = self._release(self._window_text[self._passed :])
        if self.stopped is None:
            released += self._held
            self._released.append(self._held)
        self._held = ""
        return released

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        text = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        assert isinstance(text, str)
        return text

    def _is_inert(self, token_id: int) -> bool:
        """Whether a token gives no text by itself: skipped special and unknown tokens, and parts of a character where those are dropped
        (ByT5). A pair is decoded, because a lone sentencepiece space decodes to nothing too."""
        return self._decode([token_id, token_id]) == ""

    def _restart_window(self, start: int) -> None:
        """Drop the first tokens. Decoders that treat the first token specially do so for the old and the new window alike."""
        if start == 0:
            return
        unpassed = len(self._window_text) - self._passed
        text = self._decode(self._window[start:])
        lacks_space = self._cleans_up and text.startswith("'") and start < MAX_WINDOW  # with the one before it, " ' " may be shortened
        if len(text) < unpassed or lacks_space:
            return
        self._window = self._window[start:]
        self._window_text = text
        self._passed = len(text) - unpassed

    def _release(self, fresh: str) -> str:
        text = self._held + fresh
        hits = (
            []
            if self._tokens_before_stop > 0
            else [(at + len(stop), at, stop) for stop in self._stop if (at := self._find(stop, text)) >= 0]
        )
        if hits:
            end, at, self.stopped = min(hits)
            text, self._held = text[: end if self._include_stop else at], ""
        elif self._stop:
            kept = len(text) - overlap(text, self._stop)
            text, self._held = text[:kept], text[kept:]
        if text:
            self._released.append(text)
        return text

    def _find(self, stop: str, text: str) -> int:
        """Search for a stop string that ends after the held text, which has been searched or came before `min_tokens`."""
        return text.find(stop, max(len(self._held) - len(stop) + 1, 0))


def overlap(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark; 0 if none."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)
