"""Logits to tokens: one batch, every row with its own settings and its own random numbers, on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_attn.attn_ops.batch.host_copy import copy_to_device
from paged_attn.attn_ops.batch.packed_ints import PackedInts
from paged_attn.attn_ops.model_code import model_code
from paged_attn.backends.devices import has_triton
from paged_attn.backends.sampling.sampling_tensors import SamplingTensors
from paged_attn.engine.sampling.forbidden import forbid
from paged_attn.engine.sampling.logprobs import logprobs_of
from paged_attn.engine.sampling.sample_tokens import sample_tokens
from paged_attn.engine.sampling.sampler_output import BAD_LOGITS, NONE_LEFT, SamplerOutput
from paged_attn.engine.sampling.sampling_state import SamplingState
from paged_attn.engine.sampling.structured.guides import forbid_others
from paged_attn.engine.sampling.token_counts import TokenCounts, penalised
from paged_attn.engine.sampling_params import LogitsProcessor
from paged_attn.parallel.ranks import Ranks

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)


class Sampler:
    """Chooses tokens step after step; nothing here waits for the device but `SamplerOutput.wait`.

    Args:
        ranks: the processes that run the model together, which get the same logits and must choose the same tokens.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks
        self._counts: TokenCounts | None = None
        self._last: Tensor | None = None  # the tokens of the last call, and where in them those of requests with bad words are
        self._last_rows: dict[SamplingState, int] = {}

    def choose(self, logits: Tensor, states: Mapping[int, SamplingState], greedy_tokens: Tensor | None = None) -> SamplerOutput:
        """Choose one token per row. Who goes on from there advances `num_chosen` of every state.

        Args:
            logits: [N, V], any floating dtype, any device; left untouched. -inf forbids a token.
            states: of some rows, all different; the others get the most likely token, as those with a simple state do. A request's tokens
                depend on its own row, seed and tokens so far only.
            greedy_tokens: what `greedy_sample` says of the logits, where it is known already (a captured graph holds it).

        Raises:
            ValueError: wrong shapes, or a token so far that the vocabulary does not have.

        Biases, penalties, tokens that may not come, then the request's own logits processors, what its guide forbids, temperature, top-k,
        top-p, min-p; greedy rows are `logits.argmax(-1)`.
        Source: the order and boundaries of transformers 5.23 (`generation/logits_process.py`).
        """
        logits = logits.detach()
        _check(logits)
        if missing := [row for row in states if not 0 <= row < len(logits)]:
            raise ValueError(f"states: got some for rows {missing} of {len(logits)} rows of logits; allowed: 0 to {len(logits) - 1}")
        tokens = greedy_sample(logits) if greedy_tokens is None else greedy_tokens
        changed = [row for row, state in states.items() if not state.is_greedy_only]
        if changed:
            tokens = self._choose_changed(logits, tokens, changed, states)
        wanted = {row: count for row, state in states.items() if (count := state.params.logprobs) is not None}
        logprobs = None
        if wanted:
            rows = copy_to_device(np.array(list(wanted), dtype=np.int64), logits.device)
            logprobs = logprobs_of(logits, wanted, rows, tokens.index_select(0, rows))
        self._last_rows = {state: row for row, state in states.items() if state.forbidden is not None and state.forbidden.words is not None}
        self._last = tokens if self._last_rows else None
        return SamplerOutput(tokens, logprobs)

    def forget(self, state: SamplingState) -> None:
        """The request ended, or a step of it is to be done again."""
        if self._counts is not None:
            self._counts.forget(state)

    def _choose_changed(self, logits: Tensor, best: Tensor, rows: Sequence[int], all_states: Mapping[int, SamplingState]) -> Tensor:
        """`best` [N] with the tokens of some rows replaced."""
        rows = sorted(rows, key=lambda row: _kind(all_states[row]))  # stable: greedy, drawn, drawn from the likely ones
        states = [all_states[row] for row in rows]
        counting = [number for number, state in enumerate(states) if state.counts_tokens]
        if counting and self._counts is None:
            self._counts = TokenCounts(logits.shape[-1], logits.device)
        count_rows = self._counts.rows_of([states[number] for number in counting]) if self._counts is not None else []
        edited = any(state.edits_logits for state in states)
        numbers = _Numbers.of(rows, states, counting, count_rows, edited, logits)
        source, most_likely = logits, best
        if edited:
            source = self._edited(logits, states, numbers)
            most_likely = greedy_sample(source)
        chosen = most_likely if edited else best.index_select(0, numbers.rows)
        greedy = len(states) - len(numbers.drawn.rows)
        if greedy < len(states):
            drawn = sample_tokens(source, most_likely, numbers.drawn)
            chosen = torch.cat([chosen[:greedy], torch.where(chosen[greedy:] >= 0, drawn, -1)])
        if self._ranks is not None:  # their logits are equal, but exponentials need not round alike on every device
            self._ranks.take_first(chosen)
        if counting:
            assert self._counts is not None
            self._counts.add(numbers.count_rows, chosen.index_select(0, numbers.counting))
        finite = best.index_select(0, numbers.rows) >= 0
        if edited:
            chosen = torch.where(chosen < 0, NONE_LEFT, chosen)
        return best.index_copy(0, numbers.rows, torch.where(finite, chosen, BAD_LOGITS))

    def _edited(self, logits: Tensor, states: Sequence[SamplingState], numbers: _Numbers) -> Tensor:
        """Scores [L, V] float32 of the rows with these states."""
        scores = logits.index_select(0, numbers.rows).float()
        add_biases(scores, [state.params.biases for state in states])
        if len(numbers.counting):
            assert self._counts is not None
            some = scores.index_select(0, numbers.counting)
            counts = self._counts.counts.index_select(0, numbers.count_rows)
            scores.index_copy_(0, numbers.counting, penalised(some, counts, *numbers.penalties))
        if not_next := {number: found for number, state in enumerate(states) if (found := state.not_next) is not None}:
            forbid(scores, not_next, self._last, {number: self._last_rows.get(states[number], -1) for number in not_next})
        for number, state in enumerate(states):
            if state.params.logits_processors:
                _process(state, scores[number : number + 1])
        guided = {number: state.guide for number, state in enumerate(states) if state.guide is not None}
        if guided:
            forbid_others(scores, guided)
        return scores


def greedy_sample(logits: Tensor) -> Tensor:
    """logits [N, V] -> [N] int64: the most likely token of each row, BAD_LOGITS where it is not finite. Nothing waits for the device."""
    if logits.is_cuda and has_triton():
        from paged_attn.backends.sampling import greedy

        if greedy.serves(logits):
            return greedy.greedy_sample(logits)
    best = logits.argmax(-1, keepdim=True)  # NaN counts as the largest, so the largest value tells of every bad row
    return torch.where(logits.gather(-1, best).isfinite(), best, -1).squeeze(-1)


def add_biases(scores: Tensor, biases: Sequence[Sequence[tuple[int, float]]]) -> None:
    """Add to scores [N, V] float32, in place, for each row its (token, bias) pairs; each token once in a row.

    Raises:
        ValueError: a token that the vocabulary does not have.
    """
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


class _Numbers(NamedTuple):
    """The settings of some rows on the device, from one copy."""

    rows: Tensor
    counting: Tensor  # rows, among those of the step, that have penalties
    count_rows: Tensor
    penalties: tuple[Tensor, Tensor, Tensor]
    drawn: SamplingTensors

    @classmethod
    def of(
        cls, rows: Sequence[int], states: Sequence[SamplingState], counting: Sequence[int], count_rows: Sequence[int], edited: bool,
        logits: Tensor,
    ) -> _Numbers:  # fmt: skip
        """`edited`: tokens are drawn from scores that have these rows only, and not from the logits."""
        vocab = logits.shape[-1]
        drawn = [state for state in states if not state.params.is_greedy]
        params, counted = [state.params for state in drawn], [states[number].params for number in counting]
        greedy, num_random, num_counting = len(states) - len(drawn), len(drawn), len(counting)
        packed = PackedInts(
            (len(rows), num_counting, num_counting, *(num_random,) * 4), (*(num_counting,) * 3, *(num_random,) * 2), logits.device
        )
        host = packed.host
        host[0][:], host[1][:], host[2][:] = rows, counting, count_rows
        host[3][:] = range(greedy, len(rows)) if edited else rows[greedy:]
        host[4][:] = [vocab - min(p.top_k or vocab, vocab) for p in params]
        host[5].view(np.float64)[:] = [state.uniform for state in drawn]
        host[6].view(np.float64)[:] = _left_out([p.top_p for p in params])
        reals: list[list[float]] = [
            [max(p.repetition_penalty, SMALLEST) for p in counted],  # float32 would make it 0
            [p.frequency_penalty for p in counted],
            [p.presence_penalty for p in counted],
            [p.temperature for p in params],
            [p.min_p for p in params],
        ]
        for memory, values in zip(host[7:], reals, strict=True):
            memory.view(np.float32)[:] = np.clip(values, -LARGEST, LARGEST)
        on = packed.to_device()
        repetition, frequency, presence, temperature, min_p = (tensor.view(torch.float32) for tensor in on[7:])
        settings = SamplingTensors(
            on[3],
            temperature,
            on[5].view(torch.float64),
            min_p if any(p.min_p for p in params) else None,
            on[4] if any(p.top_k for p in params) else None,
            on[6].view(torch.float64) if any(p.top_p < 1.0 for p in params) else None,
            sum(not p.has_limit for p in params),
        )
        return cls(on[0], on[1], on[2], (repetition, frequency, presence), settings)


def _left_out(top_p: Sequence[float]) -> NDArray[np.float64]:
    """The largest sums that count as no more than 1 - top_p: it is rounded to float32 from float64, and so is the sum, as in transformers.
    Negative for top-p 1, which must not leave out tokens whose probability underflowed."""
    whole = np.array(top_p)
    left_out = (1.0 - whole).astype(np.float32)
    return np.where(whole < 1.0, (left_out.astype(np.float64) + np.nextafter(left_out, np.float32(2.0)).astype(np.float64)) / 2, -1.0)


def _kind(state: SamplingState) -> int:
    return 0 if state.params.is_greedy else 1 + state.params.has_limit


def _process(state: SamplingState, scores: Tensor) -> None:
    """Scores [1, V], in place, by the processors of a request. What one of them raises is the request's own error (`SamplingState.error`):
    its scores are NaN then, and other requests go on."""
    state.error = None
    try:
        for processor in state.params.logits_processors:
            scores.copy_(_processed(processor, state, scores))
    except ValueError as error:
        state.error = error
        scores.fill_(torch.nan)


def _processed(processor: LogitsProcessor, state: SamplingState, scores: Tensor) -> Tensor:
    """Raises ValueError: it raised something, or returned no such scores."""

    def raised(why: str) -> ValueError:
        return ValueError(f"the logits processor {processor!r} raised {why}")

    with model_code(raised):
        result = processor(torch.tensor([state.tokens], dtype=torch.int64, device=scores.device), scores.clone())
    if not isinstance(result, Tensor) or result.shape != scores.shape:
        got = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else repr(type(result).__name__)
        raise ValueError(
            f"the logits processor {processor!r} returned {got}; allowed: scores of shape {tuple(scores.shape)}, as it got: "
            "processor(input_ids [1, T], scores [1, V]) -> scores [1, V]"
        )
    return result


def _check(logits: Tensor) -> None:
    if logits.dim() != 2 or logits.shape[-1] == 0 or not logits.is_floating_point():
        raise ValueError(
            f"logits: got shape {tuple(logits.shape)}, {logits.dtype}; allowed: [N, V] with V >= 1, floating point;"
            " pass the last position's logits"
        )
