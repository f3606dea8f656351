"""The sampling state of one request."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from paged_attn.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paged_attn.engine.sampling.forbidden import Forbidden, ForbiddenNext
    from paged_attn.engine.sampling.structured.guides import Guide

GOLDEN = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


class SamplingState:
    """One request's settings, its tokens so far and its position in its own sequence of random numbers.

    Args:
        tokens: the request's own list, which grows as tokens become known; now it holds the prompt.
        guide: decides which tokens may come next; must be told each token appended to `tokens`.
        forbidden: decides which tokens may not come next.

    Attributes:
        seed: the seed in use, random if `params.seed` is None.
        num_chosen: how many launched steps called `Sampler.choose` with this state (not counted while it `is_argmax_only`). The next random
            number depends only on it and on the seed, so a failed step can be repeated.
        needs_host: as `params.needs_host`, which takes longer to read.
        is_argmax_only: the most likely token is always chosen, and no log-probabilities are requested.
        allowed: `params.allowed_token_ids` as an array.
        counts_tokens: some penalty depends on the previous tokens.
        error: what a logits processor of the request raised in the last step, if it did.
    """

    def __init__(
        self, params: SamplingParams, tokens: Iterable[int] = (), guide: Guide | None = None, forbidden: Forbidden | None = None
    ) -> None:
        self.params, self.guide, self.forbidden = params, guide, forbidden
        self.tokens = tokens if isinstance(tokens, list) else list(tokens)
        self.num_prompt = len(self.tokens)
        self.seed = fresh_seed() if params.seed is None else params.seed
        self.num_chosen = 0
        self.error: ValueError | None = None
        self.allowed = None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, np.int64)
        self.counts_tokens = params.has_penalty
        self.needs_host = params.needs_host
        self._always_edits = self.counts_tokens or bool(params.logit_bias) or self.allowed is not None or self.needs_host
        self.is_argmax_only = params.is_greedy and not self._always_edits and forbidden is None and params.logprobs is None

    @property
    def edits_logits(self) -> bool:
        """Whether logits are edited before the next token is chosen."""
        return self._always_edits or (self.forbidden is not None and self.forbidden.holds(self.num_chosen))

    @property
    def forbidden_next(self) -> ForbiddenNext | None:
        """The tokens that may not come next; None if there are none."""
        if self.forbidden is None or not self.forbidden.holds(self.num_chosen):
            return None
        return self.forbidden.next(self.tokens, self.num_chosen, self.num_prompt + self.num_chosen - len(self.tokens))

    @property
    def is_greedy_only(self) -> bool:
        """Whether the most likely token is chosen next."""
        return self.params.is_greedy and not self.edits_logits

    @property
    def uniform(self) -> float:
        """The request's next random number in [0, 1): SplitMix64 (Steele et al., 2014) of the seed and `num_chosen`."""
        return (_mixed(_mixed(self.seed + GOLDEN) + (self.num_chosen + 1) * GOLDEN) >> 11) * 2.0**-53


def fresh_seed() -> int:
    return int.from_bytes(os.urandom(8))


def _mixed(value: int) -> int:
    value &= MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)
