"""Applies sampled tokens to their requests: updates text, checks stop conditions, and creates the events that report them."""

from __future__ import annotations

from dataclasses import dataclass, field

from paged_attn.attn_ops.model_code import MODEL_ERRORS
from paged_attn.engine.memory.kv_manager import KVManager
from paged_attn.engine.requests.outputs import FinishReason, TokenEvent, TokenEvents
from paged_attn.engine.requests.request import Request
from paged_attn.engine.sampling.sampler import Sampler
from paged_attn.engine.sampling.sampler_output import BAD_LOGITS, NONE_LEFT, SampledToken
from paged_attn.engine.sampling.structured.guides import GuideError
from paged_attn.engine.scheduling.scheduler import Scheduler
from paged_attn.engine.steps.in_flight import InFlightStep

LEAVING_FEWER = ("allowed_token_ids", "bad_words", "logit_bias", "logits_processors", "min_tokens")  # params that forbid tokens


@dataclass
class EngineStats:
    """Counters; seconds are wall time, in the model or waiting for it."""

    steps: int = 0
    model_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0

    def reset(self) -> None:
        """Set all counters to 0."""
        vars(self).update(vars(EngineStats()))


@dataclass
class OutputProcessor:
    """Post-processing for one engine.

    Attributes:
        requests: those that have not finished, by id.
        pending: events not yet returned by `Engine.step`.
    """

    kv: KVManager
    scheduler: Scheduler
    sampler: Sampler
    stats: EngineStats = field(default_factory=EngineStats)
    requests: dict[str, Request] = field(default_factory=dict)
    pending: TokenEvents = field(default_factory=TokenEvents)

    def add_request(self, request: Request) -> None:
        self.requests[request.id] = request

    def take_pending(self) -> TokenEvents:
        """Return the pending events and forget them."""
        events, self.pending = self.pending, TokenEvents()
        return events

    def end(self, request: Request, reason: FinishReason) -> None:
        """End a request without a token."""
        self.pending.append(self._finish(request, reason))

    def cancel(self, request: Request) -> None:
        """End a request and drop its pending events."""
        self._finish(request, FinishReason.CANCELLED)
        self.pending = self.pending.without(request.id)

    def process(self, in_flight: InFlightStep) -> None:
        """Apply a step's results. This runs for every request of every step, so it must be fast. If it raises, the next call continues
        with the results that are left."""
        pending, num_plain = self.pending.append, 0
        try:
            for request, scored in in_flight.scores():
                if request.finish_reason is None:
                    if scored is None:
                        pending(self._fail(request))
                    else:
                        request.add_scores(scored)
            for request, part, row in in_flight.pooled():
                if request.finish_reason is None and request.pooled is not None:
                    request.pooled.add(part, row)
            for request, end, token_id, known, goes_on in in_flight.results():
                if request.finish_reason is not None:
                    request.drop_pending_token()  # the request ended while this step ran
                    continue
                request.num_validated = end
                if token_id < 0:
                    request.drop_pending_token()
                    pending(self._fail(request, token_id))
                elif goes_on and token_id not in request.stop_token_ids:
                    num_plain += 1
                    request.tokens.append(token_id)
                    pending((request.id, token_id))
                else:
                    pending(self.append_token(request, known or SampledToken(token_id)))
        finally:
            self.stats.new_tokens += num_plain

    def append_token(self, request: Request, token: SampledToken) -> TokenEvent:
        """Append a token to a request: share its prefix, extend its text, and end it if the token stops it."""
        token_id, detokenizer = token.token_id, request.detokenizer
        if not request.max_new_tokens:  # only scored or embedded, which is done
            self.stats.cached_tokens += request.cached_tokens
            request.drop_pending_token()
            self.kv.share(request)  # including its snapshots, which are dropped when it ends
            return self._finish(request, FinishReason.LENGTH)
        request.tokens.append(token_id)
        if request.params.logprobs is not None:
            request.logprobs.append(token)
        is_first = request.num_sampled == 1
        if is_first:
            self.stats.cached_tokens += request.cached_tokens
        if is_first or request.snapshots:
            self.kv.share(request)  # waiting requests with the same prompt can use it from the next step on
        self.stats.new_tokens += 1
        try:
            text = detokenizer.append(token_id)
        except MODEL_ERRORS as error:
            return self._finish(request, self._fail_to_decode(request, error))
        reason = self._finish_reason(request, token_id)
        if reason is not None:
            ended = self._finish(request, reason)
            return TokenEvent(request.id, token_id, text + ended.text, ended.finish_reason, token.logprob, token.top_logprobs)
        return TokenEvent(request.id, token_id, text, None, token.logprob, token.top_logprobs)

    @staticmethod
    def _finish_reason(request: Request, token_id: int) -> FinishReason | None:
        """Why a request ends after its last token; None if it continues. Sets `stop_reason`."""
        if request.detokenizer.stopped is not None:
            request.stop_reason = request.detokenizer.stopped
            return FinishReason.STOP
        if token_id in request.stop_token_ids:
            request.stop_reason = token_id if token_id in request.params.stop_token_ids else None
            return FinishReason.STOP
        if request.sampling.guide is not None and not request.sampling.guide.goes_on_after(token_id):
            return FinishReason.STOP
        return FinishReason.LENGTH if request.num_sampled >= request.max_new_tokens else None

    def _fail(self, request: Request, token_id: int = BAD_LOGITS) -> TokenEvent:
        """End a request that got BAD_LOGITS or NONE_LEFT in place of a token."""
        guide, cause = request.sampling.guide, request.sampling.error
        ended = f"request {request.id!r} ended after {request.num_sampled} new tokens"
        if cause is not None:
            request.error = ValueError(f"{ended}, others go on: {cause}")
            request.error.__cause__ = cause
        elif guide is not None and guide.error is not None:
            request.error = GuideError(f"{ended}, others go on: {guide.error}")
        elif token_id == NONE_LEFT:
            params = request.params
            stated = [name for name in LEAVING_FEWER if getattr(params, name)]
            what = ", ".join([*stated, *([] if guide is None else [guide.what])])
            request.error = GuideError(f"{ended}, others go on: its own {what} left no token that may come next")
        else:
            request.error = ValueError(
                f"the model gave NaN or infinite logits for request {request.id!r} after {request.num_sampled} new tokens; the request "
                "ended, others go on. Check the weights, or run the model in bfloat16 or float32 if it is in float16."
            )
        return self._finish(request, FinishReason.ERROR)

    @staticmethod
    def _fail_to_decode(request: Request, error: Exception) -> FinishReason:
        """Set the error of a request whose tokens its tokenizer cannot decode."""
        why = f"its tokenizer does not decode what the model chose ({type(error).__name__}: {error})"
        what = "give a tokenizer that knows all ids of the model, or forbid the others (bad_words=[[id], ...])"
        request.error = ValueError(f"request {request.id!r} ended after {request.num_sampled} new tokens, others go on: {why}; {what}")
        request.error.__cause__ = error
        return FinishReason.ERROR

    def _finish(self, request: Request, reason: FinishReason) -> TokenEvent:
        text = ""
        try:
            text = request.detokenizer.finish() if request.detokenizer.stopped is None else ""
        except MODEL_ERRORS as error:
            reason = self._fail_to_decode(request, error)
        request.finish_reason = reason
        self.sampler.forget(request.sampling)
        self.scheduler.remove(request, share=request.num_validated > 0 and reason is not FinishReason.ERROR)
        del self.requests[request.id]
        return TokenEvent(request.id, None, text, reason)
