"""One request: its tokens, pages and sampling state."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paged_attn.engine.requests.detokenizer import IncrementalDetokenizer, WholeText
from paged_attn.engine.requests.outputs import Completion, FinishReason, Logprob
from paged_attn.engine.requests.pooled_rows import Pooled
from paged_attn.engine.requests.request_rows import RequestRows
from paged_attn.engine.sampling.sampler_output import SampledToken
from paged_attn.engine.sampling.sampling_state import SamplingState
from paged_attn.engine.sampling_params import SamplingParams

NO_SCORES = NO_BORDER = 1 << 62  # past any token


class _InRow:
    """An integer attribute of a request, stored in its row of `RequestRows` in the column of the same name."""

    def __set_name__(self, owner: type[Request], name: str) -> None:
        self._name = name

    def __get__(self, request: Request, owner: type[Request]) -> int:
        number: int = getattr(request.rows, self._name).item(request.row)
        return number

    def __set__(self, request: Request, number: int) -> None:
        getattr(request.rows, self._name)[request.row] = number


@dataclass(eq=False)
class Request:
    """Tokens, pages and sampling state of one request.

    Attributes:
        tokens: prompt and generated ids that the host knows. A request that is only scored does not need the KV of its last token: then
            that token is left out, unless other keys are needed for it.
        num_tokens: all tokens, including those chosen on the device that have not arrived on the host.
        max_new_tokens: from the params, limited by the model's positions; fixed once the request runs.
        num_prompt, token_limit: the initial and the largest possible `num_tokens` (the limit is set when the request starts to run).
        priority: lower values are more urgent.
        namespace: requests share cached prefixes only within one; tenant: tenants take turns.
        num_cached: tokens whose KV is in its pages, including those of launched steps.
        num_pages: its pages: enough for `num_cached` tokens, possibly more.
        skips_host_work: 1 if a token before the last one only needs to be appended: no text to decode at once, no log-probability and no
            sampling state to update.
        is_argmax_only: 1 if `sampling.is_argmax_only`.
        scores_from: index of the first of `tokens` whose logits (to score the next token) or hidden state (to pool) are still needed;
            NO_SCORES if none are.
        adapter: the slot of its adapter plus 1; 0 if it has none. `lora` is the adapter's name.
        future_row: row of its last chosen token on the device (see `FutureTokens`).
        produced_by: number of the step that chose that token; 0 before there is one.
        length_border: the most tokens it may have before its cached keys become invalid (see `Runner.length_borders`).
        length_borders: the model's.
        rows, row: where its numbers and pages are stored.
        num_locked: leading tokens whose pages the prefix cache owns and `lock` protects.
        state_slot: slot of its recurrent state while it runs; 0 if it has none.
        num_validated: what `num_cached` was when the last known token was sampled. Its logits were finite, so KV and state up to there are
            valid.
        snapshot_points: numbers of tokens, ascending, after which its state will be kept.
        spare_points: snapshot points, including past ones, that are only regular ones, which no other request needs.
        snapshots: states kept at such points and not shared yet: number of tokens -> slot.
        taken_slots: slots for the snapshot points of a step that is not launched yet: number of tokens -> slot.
        cached_tokens: prompt tokens that came from the prefix cache at admission.
        tokens_without_state: further tokens in the prefix cache, which could not be used for lack of a recurrent state.
        logprobs: its new tokens with their log-probabilities, if requested.
        scored: its prompt's tokens from `first_scored` on with their log-probabilities, as far as they have arrived.
        began_at: when it was first admitted, by `time.perf_counter`.
        index, answer: index of its prompt in the call, and which of the answers to that prompt it is.
        pooled: the hidden states pooled so far, if it is embedded.
        token_text: gives the text of one token, for its log-probability.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    stop_token_ids: frozenset[int]
    max_new_tokens: int
    sampling: SamplingState
    detokenizer: IncrementalDetokenizer | WholeText
    arrival: int
    namespace: Hashable = None
    tenant: Hashable = None
    prompt: str | None = None
    priority: int = 0
    tokens: list[int] = field(default_factory=list)
    rows: RequestRows = field(default_factory=lambda: RequestRows(1))
    num_locked: int = 0
    lock: Any = None
    num_validated: int = 0
    snapshot_points: list[int] = field(default_factory=list)
    spare_points: set[int] = field(default_factory=set)
    snapshots: dict[int, int] = field(default_factory=dict)
    taken_slots: dict[int, int] = field(default_factory=dict)
    cached_tokens: int = 0
    tokens_without_state: int = 0
    logprobs: list[SampledToken] = field(default_factory=list)
    scored: list[SampledToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    began_at: float | None = None
    index: int = 0
    answer: int = 0
    pooled: Pooled | None = None
    token_text: Callable[[int], str] | None = None
    lora: str | None = None
    length_borders: tuple[int, ...] = ()

    num_cached = _InRow()
    num_tokens = _InRow()
    num_prompt = _InRow()
    token_limit = _InRow()
    num_pages = _InRow()
    future_row = _InRow()
    produced_by = _InRow()
    state_slot = _InRow()
    skips_host_work = _InRow()
    is_argmax_only = _InRow()
    scores_from = _InRow()
    adapter = _InRow()
    length_border = _InRow()

    def __post_init__(self) -> None:
        self.row = self.rows.take()
        self.num_tokens = self.num_prompt = len(self.tokens)
        self.is_argmax_only = int(self.sampling.is_argmax_only)
        self.scores_from = NO_SCORES
        if self.pooled is not None and self.pooled.params.pooling != "last":
            self.scores_from = 0  # all rows are needed, and the prefix cache has none
        else:
            self.add_scores(())
        self.set_length_border()

    def set_length_border(self) -> None:
        """Choose the border for its current length. Call it while nothing is cached."""
        self.length_border = next((border for border in self.length_borders if self.num_tokens <= border), NO_BORDER)

    @property
    def prefix_key(self) -> Hashable:
        """Requests with equal keys share cached prefixes: the namespace, and the length border if the model has any."""
        return (self.namespace, self.length_border) if self.length_borders else self.namespace

    def move_to(self, rows: RequestRows) -> None:
        """Move its numbers and pages to a row of `rows`."""
        self.row = rows.take_from(self.rows, self.row)
        self.rows = rows
        self.token_limit = self.num_prompt + max(self.max_new_tokens, 1)  # a request that is only scored drops the token it samples

    def drop_pending_token(self) -> None:
        """Stop counting a token that will not arrive: the step failed or gave none, or the request ended before."""
        self.num_tokens -= 1

    @property
    def pages(self) -> tuple[int, ...]:
        """The pages of its KV in order; `add_pages`, `replace_page` and `clear_pages` change them."""
        return tuple(self.rows.pages[self.row, : self.num_pages].tolist())

    def add_pages(self, pages: Sequence[int]) -> None:
        self.rows.add_pages(self.row, pages)

    def replace_page(self, position: int, page: int) -> None:
        """Set `pages[position]`."""
        assert position < self.num_pages
        self.rows.pages[self.row, position] = page

    def clear_pages(self) -> None:
        self.rows.clear_pages(self.row)

    def pooled_row(self) -> Tensor:
        """The row [W] float32 of a request that was embedded and has ended. Raises ValueError: the model gave NaN or infinite hidden
        states."""
        assert self.pooled is not None
        row = self.pooled.result(len(self.prompt_token_ids))
        if not row.isfinite().all():
            raise ValueError(
                f"the model gave NaN or infinite hidden states for request {self.id!r}; check the weights, or run the model in bfloat16 or "
                "float32 if it is in float16"
            )
        return row

    @property
    def first_scored(self) -> int:
        """The first token of the prompt that is scored; never token 0, which no token precedes."""
        return max(self.params.prompt_logprobs_start, 1)

    @property
    def wants_scores(self) -> bool:
        return self.scores_from < NO_SCORES

    @property
    def num_reusable(self) -> int:
        """How many leading tokens may come from the prefix cache: not the last one, and none whose logits are wanted."""
        return min(len(self.tokens) - 1, self.scores_from)

    def add_scores(self, scored: Sequence[SampledToken]) -> None:
        """Append scores of the next tokens of the prompt."""
        self.scored += scored
        following = self.first_scored + len(self.scored)
        wanted = self.params.prompt_logprobs is not None and following < len(self.prompt_token_ids)
        self.scores_from = following - 1 if wanted else NO_SCORES

    @property
    def num_pending(self) -> int:
        """Tokens chosen on the device that have not arrived on the host; they are not in `tokens`."""
        return self.num_tokens - len(self.tokens)

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be computed, at least 1 while the request runs."""
        return self.num_tokens - self.num_cached

    @property
    def num_sampled(self) -> int:
        """New tokens that the host knows."""
        return max(len(self.tokens) - len(self.prompt_token_ids), 0)

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[len(self.prompt_token_ids) :]

    def completion(self) -> Completion:
        """The result of a request that has ended."""
        logprobs = None if self.params.logprobs is None else [self._as_dict(token) for token in self.logprobs]
        prompt_logprobs = None
        if self.params.prompt_logprobs is not None:
            not_scored = min(self.first_scored, len(self.prompt_token_ids))
            prompt_logprobs = [*(None,) * not_scored, *map(self._as_dict, self.scored)]
        return Completion(
            self.id, self.prompt, list(self.prompt_token_ids), self.output_token_ids, self.detokenizer.text, str(self.finish_reason),
            self.stop_reason, logprobs, self.cached_tokens, prompt_logprobs, self.index, self.answer,
        )  # fmt: skip

    def _as_dict(self, token: SampledToken) -> dict[int, Logprob]:
        assert token.logprob is not None and token.rank is not None
        text = (lambda _: None) if self.token_text is None else self.token_text
        likely = {each: Logprob(value, rank, text(each)) for rank, (each, value) in enumerate(token.top_logprobs or (), start=1)}
        return {**likely, token.token_id: Logprob(token.logprob, token.rank, text(token.token_id))}
