"""Answers that follow a JSON schema, a regular expression or a grammar: which tokens may come next."""

from __future__ import annotations

import copy
import functools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_attn.attn_ops.batch.packed_ints import copy_to_device
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.install_line import install_line
from paged_attn.backends.devices import has_triton
from paged_attn.backends.needs import Requirement
from paged_attn.backends.selection.packages import unmet_requirement
from paged_attn.engine.sampling.structured.compile_process import as_grammar, error_of, read_matcher
from paged_attn.engine.sampling.structured.trials import GuideTrials, Trial, check_size
from paged_attn.engine.sampling_params import SamplingParams

T = TypeVar("T")
LLGUIDANCE = Requirement("llguidance", "1.8", install_line("structured"))
MAX_KEPT = 64
MAX_KEPT_BYTES = 256 << 20
STACK_BYTES = 64 << 20  # many times a trial's stack: what overflows no stack there does not here
NO_TOKEN = "<|paged_attn: no token|>"
BITS = 32
_STACK_SIZE = threading.Lock()  # threading.stack_size is global: one thread sets it at a time


class GuideError(ValueError):
    """No answer can be found any more that follows what was asked for."""


class Guide:
    """What one request's answer may go on with.

    Args:
        matcher: an `LLMatcher` of llguidance at the beginning of an answer, of nobody else.
        what: the parameter that asks for it, for messages.
        vocabulary: of the matcher.
        nbytes: about how much memory it takes, all copies together.
    """

    def __init__(self, matcher: Any, what: str, vocabulary: _Vocabulary, nbytes: int) -> None:
        self.matcher, self.what, self.vocabulary, self.nbytes = matcher, what, vocabulary, nbytes

    def copy(self) -> Guide:
        """One that goes on from here by itself."""
        return Guide(self.matcher.deep_copy(), self.what, self.vocabulary, self.nbytes)

    def goes_on_after(self, token_id: int) -> bool:
        """Take in the answer's next token; whether another may follow."""
        self.matcher.consume_token(token_id)
        return bool(self.matcher.is_error() or not self.matcher.is_stopped())  # an error is told by the next mask

    @property
    def error(self) -> str | None:
        """Why no answer can be found, if so."""
        return f"{self.what}: {error_of(self.matcher)}" if self.matcher.is_error() else None


class _Vocabulary(NamedTuple):
    """A tokenizer as llguidance has read it.

    tokens: the `LLTokenizer`; size: how many tokens masks are of; never: one that may not be chosen whatever a matcher says, if any;
    spelt: end tokens that are text as well, which a matcher takes for text where the answer may not end.
    """

    tokens: Any
    size: int
    never: int | None
    spelt: tuple[int, ...] = ()


class Guides:
    """Makes guides for one model; may be used from several threads.

    Args:
        tokenizer: what tokens are as text; None refuses all guides.
        vocab_size: of the model, if it is known; eos_token_ids: what the model ends an answer with.

    Grammars are read by llguidance: first in a process of its own, which may die of them, and then here. What was read last is kept, and
    what is still in use.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos_token_ids)
        self._vocabulary: _Vocabulary | None = None
        self._trials: GuideTrials | None = None
        self.skips_trial = False  # by the rank that leads: what took it less than a limit may take another one more
        self._kept: OrderedDict[tuple[str, str], Guide] = OrderedDict()
        self._held: weakref.WeakValueDictionary[tuple[str, str], Guide] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()  # never for long: an engine's thread takes it
        self._reading = threading.Lock()

    def guide(self, params: SamplingParams) -> Guide | None:
        """The guide that the params ask for, if any. The first one reads the vocabulary, which takes a second.

        Raises:
            UnsupportedError: llguidance is not installed, or there is no tokenizer that it can read.
            ValueError: it cannot read the schema, expression or grammar; in its own words. Or that takes too much stack, memory or time.
        """
        found = self.prototype(params)
        if found is None:
            return None
        with self._lock:
            return found.copy()

    def prototype(self, params: SamplingParams) -> Guide | None:
        """What `guide` makes copies of. While it is in use, `guide` gives one at once. Raises as `guide` does."""
        asked = params.guide
        if asked is None:
            return None
        if (found := self._find(asked)) is None:
            with self._reading:
                if (found := self._find(asked)) is None:
                    found = self._read(*asked)
                    self._keep(asked, found)
        return found

    def close(self) -> None:
        """End the process that reads, also while it does; the next guide starts another."""
        if self._trials is not None:
            self._trials.close()

    def _find(self, asked: tuple[str, str]) -> Guide | None:
        with self._lock:
            if asked in self._kept:
                self._kept.move_to_end(asked)
            return self._held.get(asked)

    def _keep(self, asked: tuple[str, str], guide: Guide) -> None:
        with self._lock:
            self._kept[asked] = self._held[asked] = guide
            while len(self._kept) > MAX_KEPT or (len(self._kept) > 1 and sum(g.nbytes for g in self._kept.values()) > MAX_KEPT_BYTES):
                self._kept.popitem(last=False)

    def _read(self, what: str, source: str) -> Guide:
        if reason := unmet_requirement(LLGUIDANCE):
            raise UnsupportedError(f"{what}: {reason}")
        if self._vocabulary is None or self._trials is None:
            self._vocabulary, self._trials = self._read_vocabulary(what)
        tokens = self._vocabulary.tokens
        check_size(what, source)
        try:
            trial = Trial(0, 0.0, as_grammar(what, source)) if self.skips_trial else self._trials.run(what, source)
            matcher = _on_a_large_stack(lambda: read_matcher(tokens, trial.grammar))
        except ValueError as error:
            raise ValueError(f"{what}: {error}; got {(source if len(source) <= 80 else source[:77] + '...')!r}") from error
        return Guide(matcher, what, self._vocabulary, trial.nbytes)

    def _read_vocabulary(self, what: str) -> tuple[_Vocabulary, GuideTrials]:
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
            tokens = from_tokenizer(tokenizer, n_vocab=size, eos_token=eos)
        except ValueError as error:
            raise UnsupportedError(f"{what} needs a tokenizer that llguidance can read; of this one it says: {error}") from error
        vocabulary = _Vocabulary(tokens, size, never, tuple(end for end in eos if not tokens.is_special_token(end)))
        return vocabulary, GuideTrials(tokenizer, size, eos)


def _on_a_large_stack(work: Callable[[], T]) -> T:
    """What `work` returns or raises, on a thread of its own."""
    with ThreadPoolExecutor(1, "paged-attn-guide") as pool:
        with _STACK_SIZE:
            before = threading.stack_size(STACK_BYTES)
            done = pool.submit(work)  # starts the thread
            threading.stack_size(before)
        return done.result()


@functools.cache
def _executor(process: int) -> Any:
    """Threads of this process, which a fork of it does not have, that work out masks side by side."""
    from llguidance import LLExecutor

    return LLExecutor()


def allowed_next(guides: Sequence[Guide], pinned: bool = False) -> Tensor:
    """The tokens that may come next by N guides of one model [N, words] int32, on the host: token i is bit i % 32 of word i // 32; none
    after an error."""
    _, size, never, spelt = guides[0].vocabulary
    allowed = torch.empty(len(guides), -(-size // BITS), dtype=torch.int32, pin_memory=pinned)
    masks = allowed.numpy()
    _executor(os.getpid()).unsafe_compute_mask_ptr(
        [(guide.matcher, row) for row, guide in enumerate(guides)], masks.ctypes.data, masks.shape[1] * masks.itemsize, len(masks)
    )
    if never is not None:
        _clear(masks, never)
    for end in spelt:
        _clear(masks, end, [not guide.matcher.is_accepting() for guide in guides])
    masks[[guide.matcher.is_error() for guide in guides]] = 0
    return allowed


def _clear(masks: NDArray[np.int32], token: int, rows: Any = slice(None)) -> None:
    masks.view(np.uint32)[rows, token // BITS] &= ~np.uint32(1 << token % BITS)


def forbid_others(scores: Tensor, guides: Mapping[int, Guide]) -> None:
    """scores [N, V], in place: -inf for the tokens that the guides of some rows do not allow."""
    rows = copy_to_device(np.array(list(guides), np.int64), scores.device)
    masks = allowed_next(list(guides.values()), scores.is_cuda).to(scores.device, non_blocking=True)
    if scores.is_cuda and has_triton():
        from paged_attn.backends.sampling import edits

        edits.forbid(scores, rows, masks)
    else:
        forbid_plainly(scores, rows, masks)


def forbid_plainly(scores: Tensor, rows: Tensor, masks: Tensor) -> None:
    """scores [N, V], in place: -inf for what masks [L, words] int32 of rows [L] do not allow, past their end as well."""
    octets = masks.view(torch.uint8).unsqueeze(-1)
    bits = (octets >> torch.arange(8, dtype=torch.uint8, device=scores.device)) & 1
    forbidden = bits.view(len(masks), -1)[:, : scores.shape[-1]] == 0
    forbidden = torch.nn.functional.pad(forbidden, (0, scores.shape[-1] - forbidden.shape[-1]), value=True)
    scores[rows] = scores[rows].masked_fill_(forbidden, -torch.inf)
