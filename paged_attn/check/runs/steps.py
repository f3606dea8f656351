"""The small ragged batches of a check: a few prompts over several steps, on shuffled pages among NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.selection.select import select_for_pool
from paged_attn.recurrent.layer import RecurrentLayer
from paged_attn.recurrent.run import runner_of

if TYPE_CHECKING:
    from paged_attn.parallel.ranks import Ranks

LENGTHS = (5, 24, 13)
SHORTEST, LONGEST = 0, 1  # their indices
PAGE_SIZE = 4
ON_ANOTHER_RANK = "self-check failed on another rank of this sharded model, whose message says where. Nothing was generated."


@dataclass(frozen=True)
class ProbeSettings:
    """With which backend, and pages of how many tokens, a rewritten model is checked.

    Every run of a sharded model takes all its ranks, so that none may run more than the others by what it has seen of its own part.

    Attributes:
        ranks: those that have a part of the model each.
        length_borders: see `Runner`: a prompt that is cut to the other side of one is another.
    """

    backend: str = "auto"
    page_size: int = PAGE_SIZE
    deterministic: bool = False
    ranks: Ranks | None = None
    length_borders: tuple[int, ...] = ()

    def any_rank(self, yes: bool) -> bool:
        """Whether some rank says yes, this one if the model is whole."""
        return yes if self.ranks is None else self.ranks.any_says(yes)

    def fails(self, here: bool) -> bool:
        """`here`, whether this rank has seen something wrong. Raises UnsupportedError if another one alone has."""
        if self.any_rank(here) and not here:
            raise UnsupportedError(ON_ANOTHER_RANK)
        return here


@dataclass(frozen=True)
class Part:
    """Tokens `start` to `end` of a prompt, by its index."""

    prompt: int
    start: int
    end: int


@dataclass(frozen=True)
class Step:
    """What one batch runs, in this order; `name` is for messages."""

    name: str
    parts: tuple[Part, ...]


def probe_prompts(device: torch.device, num_ids: int, longest: int | None = None) -> list[Tensor]:
    """Seeded random prompts [T] int64 with ids below `num_ids`, none longer than the model's positions; the second is the longest."""
    generator = torch.Generator().manual_seed(20)
    most = min(LENGTHS[1], longest or LENGTHS[1])
    lengths = [max(n * most // LENGTHS[1], 1) for n in LENGTHS] if most < LENGTHS[1] else LENGTHS
    return [torch.randint(0, num_ids, (n,), generator=generator).to(device) for n in lengths]


def steps_of(prompts: Sequence[Tensor], causal: bool) -> list[Step]:
    """First chunks; then a decode row beside a chunk; then decode rows alone. Without causality, every prompt whole."""
    lengths = [len(prompt) for prompt in prompts]
    if not causal:
        return [Step("whole prompts", tuple(Part(i, 0, n) for i, n in enumerate(lengths)))]
    short, long, other = lengths
    ends = [[max(short - 2, 0), short - 1, short], [long // 2 - 1, long - 1, long], [other - 1, other - 1, other]]
    names = ("first chunks", "a decode row beside a chunk", "decode rows")
    steps, starts = [], [0, 0, 0]
    for number, name in enumerate(names):
        parts = [Part(i, starts[i], max(end[number], 0)) for i, end in enumerate(ends) if end[number] > starts[i]]
        starts = [max(end[number], 0) for end in ends]
        if parts:
            steps.append(Step(name, tuple(parts)))
    return steps


class Steps:
    """Runs steps of the prompts in turn on a pool of its own, of which all that no request uses holds NaN.

    Args:
        layers: of the pool.
        kv_dtype: of the pool.
    """

    def __init__(
        self,
        layers: Sequence[AttentionSpec],
        prompts: Sequence[Tensor],
        kv_dtype: torch.dtype,
        recurrent: Sequence[RecurrentLayer] = (),
        settings: ProbeSettings | None = None,
    ) -> None:
        settings = settings or ProbeSettings()
        self.prompts, self.page_size = prompts, settings.page_size
        self.device = prompts[0].device
        counts = [-(-len(p) // self.page_size) for p in prompts]
        self.pool = KVPool(layers, 3 + sum(counts), self.page_size, kv_dtype, self.device)
        self.pool.storage.fill_(float("nan"))
        free = [*range(2 + sum(counts), 1, -2), *range(1 + sum(counts), 0, -2)]
        self.tables = [[free.pop(0) for _ in range(n)] for n in counts]
        self.backend = select_for_pool(settings.backend, self.pool, deterministic=settings.deterministic).backend
        self.states = runner_of(recurrent, len(prompts), self.device)

    def context(self, step: Step) -> ForwardContext:
        """Its batch wants the logits of every token."""
        requests = [
            BatchRequest(
                self.prompts[p.prompt][p.start : p.end].tolist(), self.tables[p.prompt], p.start, p.end - p.start, p.prompt + 1,
                length=len(self.prompts[p.prompt]),
            )
            for p in step.parts
        ]  # fmt: skip
        return ForwardContext(Batch.build(requests, self.page_size, self.device), self.pool, self.backend, self.states)
