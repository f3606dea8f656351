"""Turns a caller's input into a request, or refuses it if model and pool can never serve it."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.engine.generation_config import as_params
from paged_attn.engine.model.model_limits import ModelLimits
from paged_attn.engine.prompts import Params
from paged_attn.engine.requests.detokenizer import IncrementalDetokenizer, MarkedDecoder, WholeText, direct_decoder
from paged_attn.engine.requests.pooled_rows import Pooled, PoolingParams
from paged_attn.engine.requests.request import Request
from paged_attn.engine.requests.token_texts import TokenTexts
from paged_attn.engine.sampling.forbidden import Forbidden, bad_words
from paged_attn.engine.sampling.sampling_state import SamplingState
from paged_attn.engine.sampling.structured.guides import Guides
from paged_attn.engine.sampling_params import SamplingParams
from paged_attn.shown import shown
from paged_attn.truncation import ALL_ROOM, Cut

NO_TOKENS = SamplingParams(temperature=0.0, max_new_tokens=0)


@dataclass
class InputProcessor:
    """Creates the requests of one engine.

    Attributes:
        limits: of the model.
        max_request_pages, page_size: the most pages that one request can hold, and the tokens of a page.
        tokenizer: decodes new tokens to text; None gives empty texts.
        has_states: the model has recurrent state.
        defaults: values of params that a request does not set.
        whole_tokens: the most tokens of a prompt that must be computed in one step; None if prompts may be split into chunks.
        guides: parses schemas and grammars.
    """

    limits: ModelLimits
    max_request_pages: int
    page_size: int
    tokenizer: Any
    has_states: bool
    defaults: SamplingParams = field(default_factory=SamplingParams)
    whole_tokens: int | None = None

    def __post_init__(self) -> None:
        self._bad_words = functools.lru_cache(64)(functools.partial(bad_words, tokenizer=self.tokenizer))
        self._token_texts = TokenTexts(self.tokenizer)
        self._decoder = direct_decoder(self.tokenizer)
        self._marked = functools.lru_cache(8)(functools.partial(MarkedDecoder, self.tokenizer))
        self.guides = Guides(self.tokenizer, self.limits.vocab_size, self.limits.eos_token_ids)

    @property
    def room(self) -> int:
        """The most tokens of a prompt that model and pool can hold."""
        tokens, limit = self.max_request_pages * self.page_size, self.limits.max_positions
        return min(each for each in (tokens, limit, self.whole_tokens) if each is not None)

    def new_tokens(self, prompt: int, params: SamplingParams) -> int:
        """How many tokens may follow a prompt of `prompt` tokens; without max_new_tokens at least 1, so that long prompts are refused."""
        wanted = max(self.room - prompt + 1, 1) if params.max_new_tokens is None else params.max_new_tokens
        return self.limits.allowed_new_tokens(prompt, wanted)

    def cut(self, params: SamplingParams | PoolingParams) -> Cut | None:
        """How a prompt is truncated, if the params ask for it."""
        if isinstance(params, PoolingParams):
            return self.cut_of(params.truncate_prompt_tokens, 0, keeps_end=False)
        return self.cut_of(params.truncate_prompt_tokens, params.over(self.defaults).max_new_tokens)

    def cut_of(self, most: int | None, new: int | None, *, keeps_end: bool = True) -> Cut | None:
        """How a prompt is truncated to `truncate_prompt_tokens=most` before `new` new tokens (None: as many as fit)."""
        if most is None:
            return None
        room = max(self.room - max(1 if new is None else new, 1) + 1, 1)
        return Cut(room if most == ALL_ROOM else most, keeps_end)

    def params_of_each(self, params: Params | Sequence[Params] | None, count: int, streamed: bool = False) -> list[SamplingParams]:
        """A caller's params as those of this model, one for each of `count` prompts. Raises ValueError: another number of them, or one that
        asks for what there is not; TypeError: none of `Params`."""
        chosen = list(params) if isinstance(params, Sequence) else [SamplingParams() if params is None else params] * count
        if len(chosen) != count:
            raise ValueError(f"{len(chosen)} SamplingParams for {count} prompts; give one for all or one for each")
        taken = [as_params(each, self.defaults, self.limits.eos_token_ids) for each in chosen]
        if self.tokenizer is None and any(each.stop for each in taken):
            raise ValueError("stop strings need a tokenizer: LLM(model, tokenizer=...), or use stop_token_ids")
        if streamed and (scores := [each.prompt_logprobs for each in taken if each.prompt_logprobs is not None]):
            raise ValueError(f"prompt_logprobs is {scores[0]} in a stream, whose events are of new tokens; use generate")
        return taken

    def make(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | PoolingParams,
        *,
        arrival: int,
        request_id: str,
        namespace: Hashable,
        tenant: Hashable,
        prompt: str | None,
        priority: int,
        text_at_end: bool,
        kept_tokens: frozenset[int],
    ) -> Request:
        """Arguments and errors as in `Engine.add_request`."""
        _check_queueing(namespace, tenant, priority)
        pooled = None
        if isinstance(params, PoolingParams):
            pooled, params = Pooled(params), NO_TOKENS
        params = params.over(self.defaults)
        if params.n != 1:
            raise ValueError(f"n: got {params.n}; allowed: 1 for a request of the engine; LLM.generate makes one for each of n answers")
        only_scores = params.prompt_logprobs is not None and params.max_new_tokens == 0
        cut = self.cut(params if pooled is None else pooled.params)
        if cut is not None and hasattr(prompt_token_ids, "__len__") and not isinstance(prompt_token_ids, (str, bytes, bytearray)):
            prompt_token_ids = cut.ids(prompt_token_ids)
        ids = self.limits.checked_prompt(prompt_token_ids, more=int(only_scores))
        tokens = list(ids)
        if only_scores and len(ids) > 1 and not self.limits.ends_a_side(len(ids) - 1):
            tokens.pop()  # its logits are not needed; it counts only where it makes the request a longer one for the model
        if pooled is not None:
            types = pooled.params.token_types
            tokens = self._with_types(ids, None if types is None else types[: len(ids)])
        max_new = self.new_tokens(len(ids), params)
        self._check_fits(len(tokens), max_new)
        stop = _union(params.stop_token_ids, frozenset() if params.ignore_eos else self.limits.eos_token_ids)
        self.limits.check_chosen(params)
        guide = self.guides.guide(params)
        words = self._bad_words(params.bad_words) if params.bad_words else None
        forbidden = Forbidden(stop, params.min_tokens, words) if params.min_tokens or words else None
        text = self._detokenizer(params, tokens, text_at_end, kept_tokens)
        request = Request(
            id=request_id, prompt_token_ids=ids, params=params, stop_token_ids=stop, max_new_tokens=max_new, tokens=tokens,
            sampling=SamplingState(params, tokens, guide, forbidden), detokenizer=text, arrival=arrival, namespace=namespace, tenant=tenant,
            prompt=prompt, priority=priority, pooled=pooled, length_borders=self.limits.length_borders,
            token_text=None if self.tokenizer is None else self._token_texts,
        )  # fmt: skip
        is_plain = isinstance(text, WholeText) and params.logprobs is None and not self.has_states and guide is None
        request.skips_host_work = is_plain
        return request

    def _detokenizer(
        self, params: SamplingParams, tokens: list[int], text_at_end: bool, kept_tokens: frozenset[int]
    ) -> WholeText | IncrementalDetokenizer:
        decoder = self._marked(kept_tokens) if kept_tokens else self._decoder
        skip = params.skip_special_tokens
        if not params.stop and (text_at_end or decoder is None):
            return WholeText(decoder, tokens, skip)
        include_stop = params.include_stop_str_in_output
        return IncrementalDetokenizer(decoder, params.stop, skip, include_stop=include_stop, min_tokens=params.min_tokens)

    def _with_types(self, ids: list[int], types: Sequence[int] | None) -> list[int]:
        """Ids as a `Body` reads them; types that it does not read, though the tokenizer tells them, count for nothing. Raises ValueError: a
        type that the model does not have."""
        vocab, num_types = self.limits.vocab_size, self.limits.num_types
        if types is None or not any(types) or num_types == 1:
            return list(ids)
        assert vocab is not None and len(types) == len(ids)
        if not 0 <= min(types) <= max(types) < num_types:
            wrong = next(kind for kind in types if not 0 <= kind < num_types)
            raise ValueError(
                f"token_types: got {wrong}; allowed: 0 to {num_types - 1}, the token types of this model; set its tokenizer right"
            )
        return [token + vocab * kind for token, kind in zip(ids, types, strict=True)]

    def _check_fits(self, prompt: int, new: int) -> None:
        # The last new token is sampled but never attended to, so its KV needs no slot.
        total, size = prompt + max(new - 1, 0), self.page_size
        if self.whole_tokens is not None and prompt > self.whole_tokens:
            raise UnsupportedError(
                f"the prompt has {prompt} tokens; the model reads a text in both directions, so that all of it is computed in one step, "
                f"and a step has {self.whole_tokens}. Raise max_batch_tokens, or shorten the prompt."
            )
        needed = -(-total // size)
        if needed > self.max_request_pages:
            raise UnsupportedError(
                f"this request can never fit: {prompt} prompt + {new} new tokens hold {total} tokens of KV = {needed} pages of {size}, "
                f"but the pool has room for {self.max_request_pages} pages of one request (= {self.max_request_pages * size} tokens). "
                "Lower max_new_tokens, shorten the prompt, or raise num_pages or kv_memory_gib."
            )


def _check_queueing(namespace: Hashable, tenant: Hashable, priority: object) -> None:
    """Raises TypeError for what the waiting queue cannot order by."""
    for name, value in (("namespace", namespace), ("tenant", tenant)):
        try:
            hash(value)
        except TypeError as error:
            raise TypeError(f"{name} is {shown(value)}; allowed is what can be hashed: a text, a number, a tuple of them") from error
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise TypeError(f"priority is {shown(priority)}; allowed are whole numbers: a lower one is more urgent, 0 is usual")


@functools.lru_cache(64)
def _union(ids: tuple[int, ...], more: frozenset[int]) -> frozenset[int]:
    """One set for all requests with the same arguments."""
    return more.union(ids)
