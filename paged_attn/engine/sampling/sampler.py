"""Turns a batch of logits into tokens on the device, each row with its own settings and its own random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from paged_attn.attn_ops.batch.packed_ints import PackedInts, copy_to_device
from paged_attn.backends.devices import has_triton
from paged_attn.engine.sampling.forbidden import allow_only, forbid
from paged_attn.engine.sampling.row_settings import RowSettings
from paged_attn.engine.sampling.sample_tokens import sample_in_place, sample_tokens
from paged_attn.engine.sampling.sampler_output import BAD_LOGITS, NONE_LEFT, SamplerOutput, logprobs_of
from paged_attn.engine.sampling.sampling_state import SamplingState
from paged_attn.engine.sampling.structured.guides import forbid_others
from paged_attn.engine.sampling.token_counts import TokenCounts, penalise
from paged_attn.engine.sampling_params import LogitsProcessor
from paged_attn.parallel.ranks import Ranks


class Sampler:
    """Chooses tokens step after step; nothing here waits for the device but `SamplerOutput.wait`. `ranks`: the processes that run the model
    together, which get the same logits and must choose the same tokens."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks
        self._counts: TokenCounts | None = None
        self._last: Tensor | None = None  # the tokens of the last call; next, the rows of requests with bad words in it
        self._last_rows: dict[SamplingState, int] = {}

    def choose(self, logits: Tensor, states: Mapping[int, SamplingState], greedy_tokens: Tensor | None = None) -> SamplerOutput:
        """Choose one token per row. The caller increments `num_chosen` of every state afterwards.

        Args:
            logits: [N, V], any floating dtype, any device; not modified. -inf forbids a token.
            states: by row, all different; rows without one, or with a greedy one, get the most likely token. A request's tokens depend
                only on its own row, seed and previous tokens.
            greedy_tokens: `greedy_sample(logits)` if it is already known (computed inside a captured graph); may be overwritten with the
                tokens that are chosen.

        Raises:
            ValueError: wrong shapes, or a previous token outside the vocabulary.

        The order: biases, penalties, forbidden tokens, the request's own logits processors, its guide, temperature, top-k, top-p, min-p;
        greedy rows are `logits.argmax(-1)`.
        Source: the order and boundaries of transformers 5.23 (`generation/logits_process.py`).
        """
        logits = logits.detach()
        _check(logits)
        if missing := [row for row in states if not 0 <= row < len(logits)]:
            raise ValueError(f"states: got some for rows {missing} of {len(logits)} rows of logits; allowed: 0 to {len(logits) - 1}")
        tokens = greedy_sample(logits) if greedy_tokens is None else greedy_tokens
        changed = [row for row, state in states.items() if not state.is_greedy_only]
        if changed:
            tokens = self._choose_non_greedy(logits, tokens, changed, states)
        wanted = {row: count for row, state in states.items() if (count := state.params.logprobs) is not None}
        logprobs = None
        if wanted:
            rows = copy_to_device(np.array(list(wanted), dtype=np.int64), logits.device)
            logprobs = logprobs_of(logits, wanted, rows, tokens.index_select(0, rows))
        self._last_rows = {state: row for row, state in states.items() if state.forbidden is not None and state.forbidden.words is not None}
        self._last = tokens if self._last_rows else None
        return SamplerOutput(tokens, logprobs)

    def forget(self, state: SamplingState) -> None:
        """Drop a request's token counts: it ended, or one of its steps will be repeated."""
        if self._counts is not None:
            self._counts.forget(state)

    def _choose_non_greedy(self, logits: Tensor, best: Tensor, rows: Sequence[int], all_states: Mapping[int, SamplingState]) -> Tensor:
        """`best` [N] with the tokens of `rows` replaced; `best` itself if kernels replace them there."""
        # Greedy rows first, then rows sampled from all tokens, then rows limited by top-k or top-p.
        rows = sorted(rows, key=lambda row: 0 if (params := all_states[row].params).is_greedy else 1 + params.has_limit)
        states = [all_states[row] for row in rows]
        counting = [number for number, state in enumerate(states) if state.counts_tokens]
        if counting and self._counts is None:
            self._counts = TokenCounts(logits.shape[-1], logits.device)
        count_rows = self._counts.rows_of([states[number] for number in counting]) if self._counts is not None else []
        edited = any(state.edits_logits for state in states)
        settings = RowSettings.of(rows, states, counting, count_rows, edited, logits)
        source, most_likely = logits, best
        if not edited and self._ranks is None and sample_in_place(logits, best, settings.drawn):
            return best
        if edited:
            source = self._edit(logits, states, settings)
            most_likely = greedy_sample(source)
        chosen = most_likely if edited else best.index_select(0, settings.rows)
        greedy = len(states) - len(settings.drawn.rows)
        if greedy < len(states) and not (edited and sample_in_place(source, chosen, settings.drawn)):
            drawn = sample_tokens(source, most_likely, settings.drawn)
            chosen = torch.cat([chosen[:greedy], torch.where(chosen[greedy:] >= 0, drawn, -1)])
        if self._ranks is not None:  # logits are equal on all ranks, but exponentials may round differently
            self._ranks.take_first(chosen)
        if counting:
            assert self._counts is not None
            self._counts.add(settings.count_rows, chosen.index_select(0, settings.counting))
        finite = best.index_select(0, settings.rows) >= 0
        if edited:
            chosen = torch.where(chosen < 0, NONE_LEFT, chosen)
        return best.index_copy(0, settings.rows, torch.where(finite, chosen, BAD_LOGITS))

    def _edit(self, logits: Tensor, states: Sequence[SamplingState], settings: RowSettings) -> Tensor:
        """The edited scores [L, V] float32 of the rows with these states."""
        scores = logits.index_select(0, settings.rows).float()
        add_biases(scores, [state.params.biases for state in states])
        if len(settings.counting):
            assert self._counts is not None
            penalise(scores, settings.counting, self._counts.counts, settings.count_rows, settings.penalties)
        if forbidden_next := {number: found for number, state in enumerate(states) if (found := state.forbidden_next) is not None}:
            forbid(scores, forbidden_next, self._last, {number: self._last_rows.get(states[number], -1) for number in forbidden_next})
        if allowed := {number: ids for number, state in enumerate(states) if (ids := state.allowed) is not None}:
            allow_only(scores, allowed)
        for number, state in enumerate(states):
            if state.params.logits_processors:
                process(state, scores[number : number + 1])
        guided = {number: state.guide for number, state in enumerate(states) if state.guide is not None}
        if guided:
            forbid_others(scores, guided)
        return scores


def greedy_sample(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """logits [N, V] -> [N] int64, in `out` if given: the most likely token of each row, BAD_LOGITS if its logit is not finite. Does not
    wait."""
    if logits.is_cuda and has_triton():
        from paged_attn.backends.sampling import greedy

        if greedy.serves(logits):
            return greedy.greedy_sample(logits, out)
    best = logits.argmax(-1, keepdim=True)  # NaN counts as the largest, so the largest value exposes every bad row
    tokens = torch.where(logits.gather(-1, best).isfinite(), best, -1).squeeze(-1)
    return tokens if out is None else out.copy_(tokens)


def add_biases(scores: Tensor, biases: Sequence[Sequence[tuple[int, float]]]) -> None:
    """Add each row's (token, bias) pairs, with distinct tokens, to scores [N, V] float32 in place. Raises ValueError: a token outside the
    vocabulary."""
    sizes = [len(each) for each in biases]
    total = sum(sizes)
    if not total:
        return
    pairs = [pair for each in biases for pair in each]
    if wrong := [token for token, _ in pairs if token >= scores.shape[-1]]:
        raise ValueError(f"logit_bias: got token id {wrong[0]}; allowed: 0 to {scores.shape[-1] - 1}, what the model's logits are of")
    packed = PackedInts((total,), (total,), scores.device)
    packed.host[0][:] = np.arange(len(biases)).repeat(sizes) * scores.shape[-1] + [token for token, _ in pairs]
    packed.host[1].view(np.float32)[:] = [bias for _, bias in pairs]
    elements, values = packed.to_device()
    flat = scores.view(-1)
    flat[elements] = flat[elements] + values.view(torch.float32)


def _check(logits: Tensor) -> None:
    if logits.dim() != 2 or logits.shape[-1] == 0 or not logits.is_floating_point():
        raise ValueError(
            f"logits: got shape {tuple(logits.shape)}, {logits.dtype}; allowed: [N, V] with V >= 1, floating point;"
            " pass the last position's logits"
        )


def process(state: SamplingState, scores: Tensor) -> None:
    """Apply a request's logits processors to scores [1, V] in place. If one raises, that is stored in `SamplingState.error` and the scores
    become NaN, so that only this request ends."""
    state.error = None
    try:
        for processor in state.params.logits_processors:
            scores.copy_(_processed(processor, state, scores))
    except ValueError as error:
        state.error = error
        scores.fill_(torch.nan)


def _processed(processor: LogitsProcessor, state: SamplingState, scores: Tensor) -> Tensor:
    """Raises ValueError if the processor raises or does not return scores of the same shape."""
    try:
        result = processor(torch.tensor([state.tokens], dtype=torch.int64, device=scores.device), scores.clone())
    except torch.OutOfMemoryError:  # the device's, and no fault of the processor
        raise
    except Exception as error:  # a caller's code may raise anything, and others share the step
        raise ValueError(f"the logits processor {processor!r} raised {type(error).__name__}: {error}") from error
    got = repr(type(result).__name__)
    if isinstance(result, Tensor):
        is_plain = result.layout is torch.strided and not (result.is_meta or result.is_nested)
        if is_plain and result.shape == scores.shape:
            return result
        got = f"a tensor of shape {tuple(result.shape)}" if is_plain else "a sparse, nested or meta tensor"
    raise ValueError(
        f"the logits processor {processor!r} returned {got}; allowed: scores of shape {tuple(scores.shape)}, as it got: "
        "processor(input_ids [1, T], scores [1, V]) -> scores [1, V]"
    )
