"""Answers that follow a JSON schema, a regular expression or a grammar: which tokens may come next."""

from __future__ import annotations

import copy
import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.packed_ints import PackedInts
from paged_attn.engine.sampling_params import SamplingParams

INSTALL = "pip install 'paged-attn[structured]'"
MAX_KEPT = 64
# Between tokens of JSON; without a bound a weak model goes on with line ends for ever.
JSON_DEFAULTS: Any = {"whitespace_pattern": r" |\n {0,40}"}
NO_TOKEN = "<|paged_attn: no token|>"
BITS = 32


class GuideError(ValueError):
    """No answer can be found any more that follows what was asked for."""


class Guide:
    """What one request's answer may go on with.

    Args:
        matcher: an `LLMatcher` of llguidance at the beginning of an answer, of nobody else.
        what: the parameter that asks for it, for messages.
        vocabulary: of the matcher.
    """

    def __init__(self, matcher: Any, what: str, vocabulary: _Vocabulary) -> None:
        self.matcher, self._what, self.vocabulary = matcher, what, vocabulary

    def copy(self) -> Guide:
        """One that goes on from here by itself."""
        return Guide(self.matcher.deep_copy(), self._what, self.vocabulary)

    def goes_on_after(self, token_id: int) -> bool:
        """Take in the answer's next token; whether another may follow."""
        self.matcher.consume_token(token_id)
        return bool(self.matcher.is_error() or not self.matcher.is_stopped())  # an error is told by the next mask

    @property
    def error(self) -> str | None:
        """Why no answer can be found, if so."""
        return f"{self._what}: {_first_words(self.matcher)}" if self.matcher.is_error() else None


class _Vocabulary(NamedTuple):
    """A tokenizer as llguidance has read it.

    tokens: the `LLTokenizer`; size: how many tokens masks are of; never: one that may not be chosen whatever a matcher says, if any.
    """

    tokens: Any
    size: int
    never: int | None


class Guides:
    """Makes guides for one model; may be used from several threads.

    Args:
        tokenizer: what tokens are as text; None refuses all guides.
        vocab_size: of the model, if it is known; eos_token_ids: what the model ends an answer with.

    Grammars are read by llguidance. What was read last is kept.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos_token_ids)
        self._vocabulary: _Vocabulary | None = None
        self._kept: OrderedDict[tuple[str, str], Guide] = OrderedDict()
        self._lock = threading.Lock()

    def guide(self, params: SamplingParams) -> Guide | None:
        """The guide that the params ask for, if any. The first one reads the vocabulary, which takes a second.

        Raises:
            UnsupportedError: llguidance is not installed, or there is no tokenizer that it can read.
            ValueError: it can not read the schema, expression or grammar; in its own words.
        """
        asked = params.guide
        if asked is None:
            return None
        with self._lock:
            if asked not in self._kept:
                self._kept[asked] = self._read(*asked)
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(asked)
            return self._kept[asked].copy()

    def _read(self, what: str, source: str) -> Guide:
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
        try:
            matcher = LLMatcher(self._vocabulary.tokens, readers[what](source), log_level=0)
        except ValueError as error:
            raise ValueError(f"{what}: {error}; got {_shortened(source)}") from error
        matcher.compute_bitmask()  # the first one may take a second, and is where some turn out to be too large, or to allow nothing
        if matcher.is_error():
            raise ValueError(f"{what}: {_first_words(matcher)}; got {_shortened(source)}")
        return Guide(matcher, what, self._vocabulary)

    def _read_vocabulary(self, what: str) -> _Vocabulary:
        from llguidance.hf import from_tokenizer

        if self._tokenizer is None:
            raise UnsupportedError(f"{what} needs the model's tokenizer: LLM(model, tokenizer=...)")
        tokenizer, eos, never = self._tokenizer, self._eos, None
        if not eos:  # then answers end when nothing can follow, and llguidance, which wants one, gets one that is never allowed
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.add_special_tokens({"eos_token": NO_TOKEN})
            eos = [never] = [tokenizer.eos_token_id]
        size = max(len(tokenizer), self._vocab_size or 0)
        try:
            return _Vocabulary(from_tokenizer(tokenizer, n_vocab=size, eos_token=eos), size, never)
        except ValueError as error:
            raise UnsupportedError(f"{what} needs a tokenizer that llguidance can read; of this one it says: {error}") from error


@functools.cache
def _executor() -> Any:
    """Threads of the process that work out masks side by side."""
    from llguidance import LLExecutor

    return LLExecutor()


def allowed_next(guides: Sequence[Guide]) -> NDArray[np.int32]:
    """The tokens that may come next by N guides of one model [N, words]: token i is bit i % 32 of word i // 32; none after an error."""
    _, size, never = guides[0].vocabulary
    masks = np.zeros((len(guides), -(-size // BITS)), np.int32)
    _executor().unsafe_compute_mask_ptr(
        [(guide.matcher, row) for row, guide in enumerate(guides)], masks.ctypes.data, masks.shape[1] * masks.itemsize, len(masks)
    )
    if never is not None:
        masks.view(np.uint32)[:, never // BITS] &= ~np.uint32(1 << never % BITS)
    masks[[guide.matcher.is_error() for guide in guides]] = 0
    return masks


def forbid_others(scores: Tensor, guides: Mapping[int, Guide]) -> None:
    """scores [N, V], in place: -inf for the tokens that the guides of some rows do not allow."""
    vocabulary = scores.shape[-1]
    words = -(-vocabulary // BITS)
    allowed = allowed_next(list(guides.values()))[:, :words]
    packed = PackedInts((len(guides),), (len(guides) * words,), scores.device)
    packed.host[0][:] = list(guides)
    packed.host[1].reshape(len(guides), words)[:, : allowed.shape[1]] = allowed
    rows, masks = packed.to_device()
    octets = masks.view(torch.uint8).unsqueeze(-1)
    bits = (octets >> torch.arange(8, dtype=torch.uint8, device=scores.device)) & 1
    forbidden = bits.view(len(guides), -1)[:, :vocabulary] == 0
    scores[rows] = scores[rows].masked_fill_(forbidden, float("-inf"))


def _json_options(schema: str) -> Any:
    """Ours, unless the schema brings its own."""
    return None if "x-guidance" in json.loads(schema) else JSON_DEFAULTS


def _first_words(matcher: Any) -> str:
    """The error of a matcher without the state that is printed behind it."""
    words: str = matcher.get_error().partition("<state>")[0].strip()
    return "no answer can follow it" if words == "NoExtensionBias" else words


def _shortened(source: str, most: int = 80) -> str:
    return repr(source if len(source) <= most else source[: most - 3] + "...")
