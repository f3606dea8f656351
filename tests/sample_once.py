"""One step of sampling, waited for: a token of each row, all of which are finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from paged_attn.engine.sampling.sampler import Sampler
from paged_attn.engine.sampling.sampler_output import SampledToken, SamplerOutput
from paged_attn.engine.sampling.sampling_state import SamplingState


class NonFiniteLogitsError(ValueError):
    """Some rows of the logits hold NaN or +inf, or nothing but -inf. `rows` are their indices."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        super().__init__(
            f"logits: rows {list(self.rows)} hold NaN or +inf, or nothing but -inf; allowed: finite values, and -inf"
            " for forbidden tokens; look for an overflow in the model (try float32 or bfloat16) and for a padded row"
        )


class Chooser(Sampler):
    """Goes on from what it chooses, as an engine's steps do."""

    def choose(self, logits: Tensor, states: Mapping[int, SamplingState], best: Tensor | None = None) -> SamplerOutput:
        output = super().choose(logits, states, best)
        for state in states.values():
            state.num_chosen += 1
        return output


def sampled(output: SamplerOutput) -> list[SampledToken | None]:
    """A token for each row, None where logits were not finite."""
    ids, known = output.wait()
    return [None if i < 0 else each or SampledToken(i, None, None) for i, each in zip(ids, known, strict=True)]


def sample(logits: Tensor, states: Sequence[SamplingState], best: Tensor | None = None) -> list[SampledToken]:
    """`Sampler.choose` for once, and wait for the tokens.

    Raises:
        NonFiniteLogitsError: some row is NaN, +inf or all -inf; no state has advanced.
        ValueError: as `Sampler.choose`.
    """
    if not states:
        return []
    if logits.dim() == 2 and len(logits) != len(states):
        raise ValueError(f"states: got {len(states)} for {len(logits)} rows of logits; allowed: one per row; pass logits[:N]")
    tokens = sampled(Sampler().choose(logits, dict(enumerate(states)), best))
    if bad := [row for row, token in enumerate(tokens) if token is None]:
        raise NonFiniteLogitsError(bad)
    for state in states:
        state.num_chosen += 1
    return [token for token in tokens if token is not None]
