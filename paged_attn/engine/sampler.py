"""Logits to tokens: one batch, every row with its own settings and its own random numbers, on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paged_attn.attn_ops.packed_ints import PackedInts
from paged_attn.backends.store_kv import has_triton
from paged_attn.engine.candidates import Filters, at_temperature, draw_from, draw_from_all, filter_scores
from paged_attn.engine.chosen import Chosen, SampledToken, logprobs_of
from paged_attn.engine.guides import forbid_others
from paged_attn.engine.logit_bias import add_biases
from paged_attn.engine.sampling_state import SamplingState
from paged_attn.engine.token_counts import TokenCounts, penalised
from paged_attn.parallel.ranks import Ranks

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)


class NonFiniteLogitsError(ValueError):
    """Some rows of the logits hold NaN or +inf, or nothing but -inf. `rows` are their indices."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        super().__init__(
            f"logits: rows {list(self.rows)} hold NaN or +inf, or nothing but -inf; allowed: finite values, and -inf"
            " for forbidden tokens; look for an overflow in the model (try float32 or bfloat16) and for a padded row"
        )


class Sampler:
    """Chooses tokens step after step; nothing here waits for the device but `Chosen.wait`.

    Args:
        ranks: the processes that run the model together, which get the same logits and must choose the same tokens.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks
        self._counts: TokenCounts | None = None

    def choose(self, logits: Tensor, states: Mapping[int, SamplingState], best: Tensor | None = None) -> Chosen:
        """Choose one token per row; `num_chosen` of every state advances.

        Args:
            logits: [N, V], any floating dtype, any device; left untouched. -inf forbids a token.
            states: of some rows, all different; the others get the most likely token, as those with a simple state do. A request's tokens
                depend on its own row, seed and tokens so far only.
            best: what `best_tokens` says of the logits, where it is known already (a captured graph holds it).

        Raises:
            ValueError: wrong shapes, or a token so far that the vocabulary does not have.

        Biases, penalties, then the request's own logits processors, what its guide forbids, temperature, top-k, top-p, min-p; greedy rows
        are `logits.argmax(-1)`.
        Source: the order and boundaries of transformers 5.23 (`generation/logits_process.py`).
        """
        logits = logits.detach()
        _check(logits)
        if missing := [row for row in states if not 0 <= row < len(logits)]:
            raise ValueError(f"states: got some for rows {missing} of {len(logits)} rows of logits; allowed: 0 to {len(logits) - 1}")
        tokens = best_tokens(logits) if best is None else best
        changed = [row for row, state in states.items() if not state.is_plain]
        if changed:
            tokens = self._choose_changed(logits, tokens, changed, states)
        wanted = {row: count for row, state in states.items() if (count := state.params.logprobs) is not None}
        logprobs = logprobs_of(logits, tokens, wanted, _on_device(list(wanted), logits.device)) if wanted else None
        for state in states.values():
            state.num_chosen += 1
        return Chosen(tokens, logprobs)

    def forget(self, state: SamplingState) -> None:
        """The request ended, or a step of it is to be done again."""
        if self._counts is not None:
            self._counts.forget(state)

    def _choose_changed(self, logits: Tensor, best: Tensor, rows: Sequence[int], all_states: Mapping[int, SamplingState]) -> Tensor:
        """`best` [N] with the tokens of some rows replaced."""
        rows = sorted(rows, key=lambda row: _kind(all_states[row]))  # stable: greedy, drawn from all, drawn from some
        states = [all_states[row] for row in rows]
        counting = [place for place, state in enumerate(states) if state.counts_tokens]
        count_rows = self._counts_for(logits).rows_of([states[place] for place in counting]) if counting else []
        numbers = _Numbers.of(rows, states, counting, count_rows, logits)
        scores = logits.index_select(0, numbers.rows).float()
        add_biases(scores, [state.params.biases for state in states])
        if counting:
            assert self._counts is not None
            some = scores.index_select(0, numbers.counting)
            counts = self._counts.counts.index_select(0, numbers.count_rows)
            scores.index_copy_(0, numbers.counting, penalised(some, counts, *numbers.penalties))
        for place, state in enumerate(states):
            for processor in state.params.logits_processors:
                scores[place : place + 1] = _processed(processor, state, scores[place : place + 1])
        guided = {place: state.guide for place, state in enumerate(states) if state.guide is not None}
        if guided:
            forbid_others(scores, guided)
        chosen = best_tokens(scores)
        greedy = sum(state.params.is_greedy for state in states)
        filtered = greedy + numbers.num_unfiltered
        if greedy < len(states):
            valid, scores = chosen[greedy:] >= 0, at_temperature(scores[greedy:], numbers.temperature)
            parts = []
            if filtered > greedy:
                parts.append(draw_from_all(scores[: filtered - greedy], numbers.uniform[: filtered - greedy]))
            if filtered < len(states):
                candidates = filter_scores(scores[filtered - greedy :], numbers.filters)
                parts.append(draw_from(candidates, numbers.uniform[filtered - greedy :]))
            chosen = torch.cat([chosen[:greedy], torch.where(valid, torch.cat(parts), -1)])
        if self._ranks is not None:  # their logits are equal, but running sums need not round alike on every device
            self._ranks.take_first(chosen)
        if counting:
            assert self._counts is not None
            self._counts.add(numbers.count_rows, chosen.index_select(0, numbers.counting))
        finite = best.index_select(0, numbers.rows) >= 0
        return best.index_copy(0, numbers.rows, torch.where(finite, chosen, -1))

    def _counts_for(self, logits: Tensor) -> TokenCounts:
        if self._counts is None:
            self._counts = TokenCounts(logits.shape[-1], logits.device)
        return self._counts


def sample(logits: Tensor, states: Sequence[SamplingState], best: Tensor | None = None) -> list[SampledToken]:
    """`Sampler.choose` for once, and wait for the tokens.

    Raises:
        NonFiniteLogitsError: some row is NaN, +inf or all -inf; no state has advanced.
        ValueError: as `Sampler.choose`.
    """
    if not states:
        return []
    _check(logits)
    if len(logits) != len(states):
        raise ValueError(f"states: got {len(states)} for {len(logits)} rows of logits; allowed: one per row; pass logits[:N]")
    tokens = Sampler().choose(logits, dict(enumerate(states)), best).wait().sampled
    if bad := [row for row, token in enumerate(tokens) if token is None]:
        for state in states:
            state.num_chosen -= 1
        raise NonFiniteLogitsError(bad)
    return [token for token in tokens if token is not None]


def best_tokens(logits: Tensor) -> Tensor:
    """logits [N, V] -> [N] int64: the most likely token of each row, -1 where the row is not finite. Nothing waits for the device."""
    if logits.is_cuda and has_triton():
        from paged_attn.backends.triton.best_token import best_token, serves

        if serves(logits):
            return best_token(logits)
    best = logits.argmax(-1, keepdim=True)  # NaN counts as the largest, so the largest value tells of every bad row
    return torch.where(logits.gather(-1, best).isfinite(), best, -1).squeeze(-1)


class _Numbers(NamedTuple):
    """The settings of some rows on the device, from one copy."""

    rows: Tensor
    counting: Tensor  # places among the rows that have penalties
    count_rows: Tensor
    penalties: tuple[Tensor, Tensor, Tensor]
    uniform: Tensor  # of the drawn rows, and so is the temperature
    temperature: Tensor
    filters: Filters  # of those that are drawn from some tokens only
    num_unfiltered: int

    @classmethod
    def of(
        cls, rows: Sequence[int], states: Sequence[SamplingState], counting: Sequence[int], count_rows: Sequence[int], logits: Tensor
    ) -> _Numbers:
        vocab = logits.shape[-1]
        drawn = [state for state in states if not state.params.is_greedy]
        some = [state.params for state in drawn if state.params.has_filter]
        counted = [states[place].params for place in counting]
        packed = PackedInts(
            (len(rows), len(counting), len(counting), len(drawn), len(some)),
            (len(counting),) * 3 + (len(drawn), len(some), len(some)),
            logits.device,
        )
        host = packed.host
        host[0][:], host[1][:], host[2][:] = rows, counting, count_rows
        host[3].view(np.float64)[:] = [state.uniform for state in drawn]
        host[4][:] = [vocab - min(p.top_k or vocab, vocab) for p in some]
        reals: list[list[float]] = [
            [max(p.repetition_penalty, SMALLEST) for p in counted],  # float32 would make it 0
            [p.frequency_penalty for p in counted],
            [p.presence_penalty for p in counted],
            [state.params.temperature for state in drawn],
            # 1 - top_p is rounded from float64 once, as in transformers; top-p 1 must not drop underflown tokens
            [1.0 - p.top_p if p.top_p < 1.0 else -1.0 for p in some],
            [p.min_p for p in some],
        ]
        for memory, values in zip(host[5:], reals, strict=True):
            memory.view(np.float32)[:] = np.clip(values, -LARGEST, LARGEST)
        on = packed.to_device()
        real = [tensor.view(torch.float32) for tensor in on[5:]]
        any_of = (any(p.top_k for p in some), any(p.top_p < 1.0 for p in some), any(p.min_p for p in some))
        filters = Filters(on[4], real[4], real[5], *any_of)
        penalties = (real[0], real[1], real[2])
        return cls(on[0], on[1], on[2], penalties, on[3].view(torch.float64), real[3], filters, len(drawn) - len(some))


def _kind(state: SamplingState) -> int:
    return 0 if state.params.is_greedy else 1 + state.params.has_filter


def _processed(processor: object, state: SamplingState, scores: Tensor) -> Tensor:
    """What a processor of transformers makes of scores [1, V]."""
    assert callable(processor)
    tokens = torch.tensor([state.tokens], dtype=torch.int64, device=scores.device)
    result = processor(tokens, scores.clone())
    if not isinstance(result, Tensor) or result.shape != scores.shape:
        got = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else repr(type(result).__name__)
        raise ValueError(
            f"the logits processor {processor!r} returned {got}; allowed: scores of shape {tuple(scores.shape)}, as it got: "
            "processor(input_ids [1, T], scores [1, V]) -> scores [1, V]"
        )
    return result


def _on_device(rows: Sequence[int], device: torch.device) -> Tensor:
    packed = PackedInts((len(rows),), (), device)
    packed.host[0][:] = rows
    return packed.to_device()[0]


def _check(logits: Tensor) -> None:
    if logits.dim() != 2 or logits.shape[-1] == 0 or not logits.is_floating_point():
        raise ValueError(
            f"logits: got shape {tuple(logits.shape)}, {logits.dtype}; allowed: [N, V] with V >= 1, floating point;"
            " pass the last position's logits"
        )
