"""Logits to tokens: one batch, every row with its own settings and its own random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paged_attn.engine.sampling_params import SamplingParams

NEG_INF = float("-inf")


class SampledToken(NamedTuple):
    """A chosen token and, when asked for, log-probabilities of the model's own distribution (before any penalty).

    `top_logprobs` has the most likely token first, the lower id first among equals, and none of probability 0.
    """

    token_id: int
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...] | None


class NonFiniteLogitsError(ValueError):
    """Some rows of the logits hold NaN or +inf, or nothing but -inf. `rows` are their indices."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        super().__init__(
            f"logits: rows {list(self.rows)} hold NaN or +inf, or nothing but -inf; allowed: finite values, and -inf"
            " for forbidden tokens; look for an overflow in the model (try float32 or bfloat16) and for a padded row"
        )


class SamplingState:
    """What sampling remembers of one request; it survives preemption.

    Attributes:
        params: the request's settings.
        seed: the seed in use, drawn from entropy when `params.seed` is None.
        largest_seen: the largest token id observed while the repetition penalty is on; -1 for none.
        generator: CPU generator; advances by one float64 per token sampled at temperature > 0, and never otherwise.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.generator = torch.Generator()
        if params.seed is None:
            self.seed = self.generator.seed()
        else:
            self.seed = params.seed
            self.generator.manual_seed(params.seed)
        self.largest_seen = -1
        self._seen: set[int] = set()
        self._seen_buf = torch.empty(0, dtype=torch.int64)

    def observe(self, token_ids: Iterable[int]) -> None:
        """Count prompt or generated tokens for the repetition penalty; `sample` does not do so itself.

        Observing a token twice changes nothing. Raises ValueError for a negative id.
        """
        if self.params.repetition_penalty == 1.0:
            return
        fresh = set(token_ids) - self._seen
        if not fresh:
            return
        if min(fresh) < 0:
            raise ValueError(f"token_ids: got {min(fresh)}; allowed: ids >= 0; leave padding out")
        start, end = len(self._seen), len(self._seen) + len(fresh)
        if end > len(self._seen_buf):
            grown = torch.empty(2 * end, dtype=torch.int64)
            grown[:start] = self._seen_buf[:start]
            self._seen_buf = grown
        self._seen_buf[start:end] = torch.tensor(list(fresh), dtype=torch.int64)
        self._seen |= fresh
        self.largest_seen = max(self.largest_seen, *fresh)

    @property
    def seen_ids(self) -> Tensor:
        """The distinct tokens observed, [n] int64 on the CPU, in no order; empty when the penalty is 1."""
        return self._seen_buf[: len(self._seen)]

    def draw(self) -> float:
        """The request's next uniform number in [0, 1)."""
        return torch.rand((), dtype=torch.float64, generator=self.generator).item()


class SortedCandidates(NamedTuple):
    """Each row's tokens from least to most likely; those at and after `first` may be drawn.

    order [N, V] int64 token ids, cumulative [N, V] float64 probabilities (after top-k), first [N, 1] int64.
    """

    order: Tensor
    cumulative: Tensor
    first: Tensor


def sample(logits: Tensor, states: Sequence[SamplingState], best: Tensor | None = None) -> list[SampledToken]:
    """Choose one token per row.

    Args:
        logits: [N, V], any floating dtype, any device; left untouched. -inf forbids a token.
        states: N of them, row by row. A request's tokens depend on its own row and generator only.
        best: what `best_tokens` says of the logits, where it is known already (a captured graph holds it).

    Raises:
        NonFiniteLogitsError: some row is NaN, +inf or all -inf; no generator has advanced.
        ValueError: wrong shapes, or an observed token that the vocabulary does not have.

    Source: the order and boundaries of transformers 5.23 (`generation/logits_process.py`): repetition penalty,
    temperature, top-k, top-p, min-p. Greedy rows are `logits.argmax(-1)`.
    """
    logits = logits.detach()
    _check(logits, states)
    if not states:
        return []
    tokens = _checked(best_tokens(logits) if best is None else best)
    penalised = [row for row, s in enumerate(states) if s.params.is_greedy and s.params.repetition_penalty != 1.0]
    drawn = [row for row, s in enumerate(states) if not s.params.is_greedy]
    if penalised:
        scores = _penalised_scores(logits, penalised, states)
        for row, token in zip(penalised, scores.argmax(-1).tolist(), strict=True):
            tokens[row] = token
    if drawn:
        row_states = [states[row] for row in drawn]
        candidates = filter_scores(_penalised_scores(logits, drawn, states), [s.params for s in row_states])
        for row, token in zip(drawn, _draw(candidates, [s.draw() for s in row_states]), strict=True):
            tokens[row] = token
    return _with_logprobs(logits, tokens, [s.params.logprobs for s in states])


def filter_scores(scores: Tensor, params: Sequence[SamplingParams]) -> SortedCandidates:
    """Temperature, top-k, top-p and min-p, each row by its own `params` (all at temperature > 0).

    Args:
        scores: [N, V] float32, repetition penalty applied; overwritten.
    """
    vocab = scores.shape[-1]
    # 1 - top_p is rounded from float64 once, as in transformers; top-p 1 must not drop underflown tokens
    rows = [[p.temperature, p.min_p, 1.0 - p.top_p if p.top_p < 1.0 else -1.0] for p in params]
    temperature, min_p, tail = torch.tensor(rows, dtype=torch.float32).to(scores.device).unsqueeze(-1).unbind(1)
    scores.div_(temperature).clamp_(max=torch.finfo(torch.float32).max)
    # stable, so that ties fall the same way whatever else is in the batch
    values, order = torch.sort(scores, dim=-1, stable=True)
    first = torch.zeros(len(params), 1, dtype=torch.int64, device=scores.device)
    if any(p.top_k for p in params):
        lowest = [[vocab - min(p.top_k or vocab, vocab)] for p in params]
        dropped = values < values.gather(-1, torch.tensor(lowest, device=scores.device))
        values.masked_fill_(dropped, NEG_INF)
        first = dropped.sum(-1, keepdim=True)
    # float64: what torch's float32 cumsum uses inside on the CPU, and on a GPU the sum then hardly depends on the batch
    cumulative = values.softmax(-1).cumsum(-1, dtype=torch.float64)
    if any(p.top_p < 1.0 for p in params):
        count = (cumulative.float() <= tail).sum(-1, keepdim=True)
        first = torch.maximum(first, count.clamp_(max=vocab - 1))
    if any(p.min_p for p in params):
        ranks = torch.arange(vocab, device=scores.device)
        dropped = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, ranks < first)
        probs = scores.masked_fill(dropped, NEG_INF).softmax(-1)
        count = (probs < min_p * probs.amax(-1, keepdim=True)).sum(-1, keepdim=True)
        first = torch.maximum(first, count.clamp_(max=vocab - 1))
    return SortedCandidates(order, cumulative, first)


def _draw(candidates: SortedCandidates, uniforms: list[float]) -> list[int]:
    """Inverse CDF over the allowed tokens, without normalising again."""
    order, cumulative, first = candidates
    uniform = torch.tensor(uniforms, dtype=torch.float64).to(order.device).unsqueeze(-1)
    below = cumulative.gather(-1, (first - 1).clamp(min=0)).masked_fill(first == 0, 0.0)
    target = below + uniform * (cumulative[:, -1:] - below)
    rank = torch.searchsorted(cumulative, target, right=True).clamp_(max=order.shape[-1] - 1)
    return order.gather(-1, torch.maximum(rank, first)).squeeze(-1).tolist()


def _check(logits: Tensor, states: Sequence[SamplingState]) -> None:
    if logits.dim() != 2 or logits.shape[-1] == 0 or not logits.is_floating_point():
        raise ValueError(
            f"logits: got shape {tuple(logits.shape)}, {logits.dtype}; allowed: [N, V] with V >= 1, floating point;"
            " pass the last position's logits"
        )
    rows, vocab = logits.shape
    if rows != len(states):
        raise ValueError(f"states: got {len(states)} for {rows} rows of logits; allowed: one per row; pass logits[:N]")
    for row, state in enumerate(states):
        if state.largest_seen >= vocab:
            raise ValueError(
                f"observed tokens of row {row}: got id {state.largest_seen}; allowed: ids below the vocabulary's"
                f" {vocab}; observe only ids that the model can produce"
            )


def best_tokens(logits: Tensor) -> Tensor:
    """logits [N, V] -> [N] int64: the most likely token of each row, -1 where the row is not finite. Nothing waits for the device."""
    best = logits.argmax(-1, keepdim=True)  # NaN counts as the largest, so the largest value tells of every bad row
    return torch.where(logits.gather(-1, best).isfinite(), best, -1).squeeze(-1)


def _checked(best: Tensor) -> list[int]:
    tokens: list[int] = best.tolist()
    if min(tokens) < 0:
        raise NonFiniteLogitsError([row for row, token in enumerate(tokens) if token < 0])
    return tokens


def _penalised_scores(logits: Tensor, rows: list[int], states: Sequence[SamplingState]) -> Tensor:
    """A float32 copy [len(rows), V] of some rows, repetition penalty applied."""
    scores = logits.index_select(0, torch.tensor(rows, device=logits.device)).float()
    penalised = [(i, states[row]) for i, row in enumerate(rows) if len(states[row].seen_ids)]
    if penalised:
        seen = [state.seen_ids for _, state in penalised]
        lengths = torch.tensor([len(ids) for ids in seen])
        row_ids = torch.tensor([i for i, _ in penalised]).repeat_interleave(lengths).to(scores.device)
        penalties = torch.tensor([s.params.repetition_penalty for _, s in penalised], dtype=torch.float32)
        penalty = penalties.repeat_interleave(lengths).to(scores.device)
        token_ids = torch.cat(seen).to(scores.device)
        old = scores[row_ids, token_ids]
        scores[row_ids, token_ids] = torch.where(old < 0, old * penalty, old / penalty)
    return scores


def _with_logprobs(logits: Tensor, tokens: list[int], wanted: list[int | None]) -> list[SampledToken]:
    sampled = [SampledToken(token, None, None) for token in tokens]
    counts = {row: k for row, k in enumerate(wanted) if k is not None}
    if not counts:
        return sampled
    rows = list(counts)
    logprobs = logits.index_select(0, torch.tensor(rows, device=logits.device)).float().log_softmax(-1)
    own = logprobs.gather(-1, torch.tensor([[tokens[row]] for row in rows], device=logits.device)).squeeze(-1).tolist()
    best: dict[int, list[tuple[int, float]]] = {row: [] for row in rows}
    largest = min(max(counts.values()), logits.shape[-1])
    if largest:
        # topk breaks ties as it likes: take all that tie with the last, and choose by id
        last = logprobs.topk(largest, dim=-1).values[:, -1:]
        index, ids = ((logprobs >= last) & (logprobs > NEG_INF)).nonzero(as_tuple=True)
        for i, token, logprob in zip(index.tolist(), ids.tolist(), logprobs[index, ids].tolist(), strict=True):
            best[rows[i]].append((token, logprob))
    for row, logprob in zip(rows, own, strict=True):
        ranked = sorted(best[row], key=lambda pair: (-pair[1], pair[0]))
        sampled[row] = SampledToken(tokens[row], logprob, tuple(ranked[: counts[row]]))
    return sampled
