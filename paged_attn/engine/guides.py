"""Answers that follow a JSON schema, a regular expression or a grammar: which tokens may come next."""

from __future__ import annotations

import copy
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.engine.sampling_params import SamplingParams

INSTALL = "pip install 'paged-attn[structured]'"
MAX_KEPT = 64
JSON_DEFAULTS: Any = {
    "whitespace_pattern": r" |\n {0,40}"
}  # between tokens of JSON; without a bound a weak model goes on with line ends for ever
NO_TOKEN = "<|paged_attn: no token|>"
BITS = 32


class Guide:
    """What one request's answer may go on with.

    Args:
        matcher: an `LLMatcher` of llguidance at the beginning of an answer, of nobody else.
        what: the parameter that asks for it, for messages.
        never: a token that may not be chosen whatever the matcher says.
    """

    def __init__(self, matcher: Any, what: str, never: int | None = None) -> None:
        self._matcher, self._what, self._never = matcher, what, never

    def goes_on_after(self, token_id: int) -> bool:
        """Take in the answer's next token; whether another may follow."""
        self._matcher.consume_token(token_id)
        return bool(self._matcher.is_error() or not self._matcher.is_stopped())  # an error is told by the next mask

    def allowed(self) -> NDArray[np.int32]:
        """The tokens that may come next: token i is bit i % 32 of word i // 32; none after an error."""
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32).copy()
        if self._matcher.is_error():
            return words[:0]
        if self._never is not None:
            words.view(np.uint32)[self._never // BITS] &= ~np.uint32(1 << self._never % BITS)
        return words

    @property
    def error(self) -> str | None:
        """Why no answer can be found, if so."""
        return f"{self._what}: {_first_words(self._matcher)}" if self._matcher.is_error() else None


class Guides:
    """Makes guides for one model; may be used from several threads.

    Args:
        tokenizer: what tokens are as text; None refuses all guides.
        vocab_size: of the model, if it is known; eos_token_ids: what the model ends an answer with.

    Grammars are read by llguidance. What was read last is kept.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos_token_ids)
        self._vocabulary: Any = None
        self._never: int | None = None
        self._matchers: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = threading.Lock()

    def guide(self, params: SamplingParams) -> Guide | None:
        """The guide that the params ask for, if any. The first one reads the vocabulary, which takes a second.

        Raises:
            UnsupportedError: llguidance is not installed, or there is no tokenizer that it can read.
            ValueError: it can not read the schema, expression or grammar; in its own words.
        """
        if params.guide is None:
            return None
        with self._lock:
            if params.guide not in self._matchers:
                self._matchers[params.guide] = self._read(*params.guide)
                if len(self._matchers) > MAX_KEPT:
                    self._matchers.popitem(last=False)
            self._matchers.move_to_end(params.guide)
            return Guide(self._matchers[params.guide].deep_copy(), params.guide[0], self._never)

    def _read(self, what: str, source: str) -> Any:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise UnsupportedError(f"{what} needs llguidance, which is not installed: {INSTALL}") from error
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary(what)
        readers: dict[str, Callable[[str], str]] = {
            "json_schema": lambda schema: LLMatcher.grammar_from_json_schema(schema, defaults=_json_options(schema)),
            "regex": LLMatcher.grammar_from_regex,
            "grammar": LLMatcher.grammar_from_lark,
        }
        matcher = LLMatcher(self._vocabulary, readers[what](source), log_level=0)
        if matcher.is_error():
            raise ValueError(f"{what}: {_first_words(matcher)}; got {_shortened(source)}")
        return matcher

    def _read_vocabulary(self, what: str) -> Any:
        from llguidance.hf import from_tokenizer

        if self._tokenizer is None:
            raise UnsupportedError(f"{what} needs the model's tokenizer: LLM(model, tokenizer=...)")
        tokenizer, eos = self._tokenizer, self._eos
        if not eos:  # then answers end when nothing can follow, and llguidance, which wants one, gets one that is never allowed
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.add_special_tokens({"eos_token": NO_TOKEN})
            eos = [self._never] = [tokenizer.eos_token_id]
        try:
            return from_tokenizer(tokenizer, n_vocab=max(len(tokenizer), self._vocab_size or 0), eos_token=eos)
        except ValueError as error:
            raise UnsupportedError(f"{what} needs a tokenizer that llguidance can read; of this one it says: {error}") from error


def forbid_others(scores: Tensor, places: Sequence[int], guides: Sequence[Guide]) -> Tensor:
    """scores [N, V] with -inf for the tokens that the guides of some rows do not allow."""
    vocabulary = scores.shape[-1]
    words = -(-vocabulary // BITS)
    host = torch.zeros(len(guides), words, dtype=torch.int32, pin_memory=scores.is_cuda)
    for row, guide in zip(host.numpy(), guides, strict=True):
        allowed = guide.allowed()[:words]
        row[: len(allowed)] = allowed
    masks = host.to(scores.device, non_blocking=True)
    bits = (masks.unsqueeze(-1) >> torch.arange(BITS, dtype=torch.int32, device=scores.device)) & 1
    forbidden = bits.view(len(guides), -1)[:, :vocabulary] == 0
    for place, row in zip(places, forbidden, strict=True):
        scores[place].masked_fill_(row, float("-inf"))
    return scores


def _json_options(schema: str) -> Any:
    """Ours, unless the schema brings its own."""
    return None if "x-guidance" in json.loads(schema) else JSON_DEFAULTS


def _first_words(matcher: Any) -> str:
    """The error of a matcher without the state that is printed behind it."""
    words: str = matcher.get_error()
    return words.partition("<state>")[0].strip()


def _shortened(source: str, most: int = 80) -> str:
    return repr(source if len(source) <= most else source[: most - 3] + "...")
