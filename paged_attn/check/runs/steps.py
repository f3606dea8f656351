"""The ragged batches of a check: a few prompts over several steps, and once among many other tokens, on shuffled pages amid NaN."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
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

MOST_RARE = 8
NARROW = 8  # elements per token; wider tables tell every id apart
USUAL = 0.9  # share of equal rows that makes the others rare
FEWEST = 32  # ids; of smaller tables all ids are used anyway

if TYPE_CHECKING:
    from paged_attn.parallel.ranks import Ranks

LENGTHS = (5, 24, 13)
IN_FRONT, IN_FRONT_ON_GPU = 256, 1024  # tokens of another request before the first prompt
BETWEEN = 64  # tokens between the prompts, and after the last
SHORTEST, LONGEST = 0, 1  # indices of these prompts
PAGE_SIZE = 4
ON_ANOTHER_RANK = "self-check failed on another rank of this sharded model, whose message says where. Nothing was generated."


@dataclass(frozen=True)
class ProbeSettings:
    """The backend and page size with which a rewritten model is checked.

    Every run of a sharded model needs all its ranks, so no rank may run more often than the others because of what it saw of its own part.

    Attributes:
        ranks: each has a part of the model.
        length_borders: see `Runner`: cutting a prompt across one of them changes its rows.
    """

    backend: str = "auto"
    page_size: int = PAGE_SIZE
    deterministic: bool = False
    ranks: Ranks | None = None
    length_borders: tuple[int, ...] = ()

    def any_rank(self, yes: bool) -> bool:
        """Whether this or, in a sharded model, any rank says yes."""
        return yes if self.ranks is None else self.ranks.any_says(yes)

    def fails(self, here: bool) -> bool:
        """Returns `here`, whether this rank has seen an error. Raises UnsupportedError if only another rank has."""
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
    """The parts of one batch, in order; `name` is for messages."""

    name: str
    parts: tuple[Part, ...]


def probe_prompts(device: torch.device, num_ids: int, longest: int | None = None, least: int = 1) -> list[Tensor]:
    """Seeded random prompts [T] int64 with ids below `num_ids`, none longer than the model's positions; the second is the longest. `least`:
    the fewest tokens that a prompt may have."""
    generator = torch.Generator().manual_seed(20)
    most = min(LENGTHS[1], longest or LENGTHS[1])
    lengths = [max(n * most // LENGTHS[1], 1) for n in LENGTHS] if most < LENGTHS[1] else LENGTHS
    if min(lengths) < least:
        lengths = [min(n + least, longest or n + least) for n in lengths]
    return [torch.randint(0, num_ids, (n,), generator=generator).to(device) for n in lengths]


def steps_of(prompts: Sequence[Sized], causal: bool, others: Sequence[Sized] = ()) -> list[Step]:
    """The steps for these prompts: first chunks, a decode row beside a chunk, only decode rows, and every prompt whole, alternating with
    `others`, if any. Without causality all steps have whole prompts."""
    whole = [Part(i, 0, len(prompt)) for i, prompt in enumerate((*prompts, *others))]
    own, around = whole[: len(prompts)], whole[len(prompts) :]
    steps = _in_parts(prompts) if causal else [Step("whole prompts", tuple(own))]
    if around:
        alternating = (around[0], *(part for pair in zip(own, around[1:], strict=True) for part in pair))
        steps.append(Step(f"{sum(map(len, others))} tokens of other requests", alternating))
    return steps


def _in_parts(prompts: Sequence[Sized]) -> list[Step]:
    short, long, other = [len(prompt) for prompt in prompts]
    ends = [[max(short - 2, 0), short - 1, short], [long // 2 - 1, long - 1, long], [other - 1, other - 1, other]]
    names = ("first chunks", "a decode row beside a chunk", "decode rows")
    steps, starts = [], [0, 0, 0]
    for number, name in enumerate(names):
        parts = [Part(i, starts[i], max(end[number], 0)) for i, end in enumerate(ends) if end[number] > starts[i]]
        starts = [max(end[number], 0) for end in ends]
        if parts:
            steps.append(Step(name, tuple(parts)))
    return steps


def others_for(prompts: Sequence[Tensor], longest: int | None = None) -> list[Tensor]:
    """Requests around the prompts, one before and one after each, [T] int64, so that anything that mixes more tokens than a prompt has
    reaches some of theirs. They consist of the prompts' own ids, so that errors that add up over a batch become large.

    Args:
        longest: the model's number of positions.
    """
    ids = torch.cat(list(prompts))
    generator = torch.Generator().manual_seed(21)
    counts = [min(n, longest or n) for n in _other_lengths(ids.device)]
    return [ids[torch.randint(len(ids), (n,), generator=generator).to(ids.device)] for n in counts]


def _other_lengths(device: torch.device) -> list[int]:
    return [IN_FRONT_ON_GPU if device.type == "cuda" else IN_FRONT, *[BETWEEN] * len(LENGTHS)]


def lengths_of_steps(device: torch.device) -> tuple[tuple[tuple[int, int], ...], ...]:
    """(cached, new) tokens of each request in each step of a causal model, for compiling ahead."""
    run = steps_of([range(n) for n in LENGTHS], True, [range(n) for n in _other_lengths(device)])
    return tuple(tuple((part.start, part.end - part.start) for part in step.parts) for step in run)


class Steps:
    """Runs steps of the prompts in order on a pool of its own; everything unused there is NaN.

    Args:
        layers: the pool's.
        kv_dtype: the pool's.
        others: requests without wanted logits; `Part.prompt` counts them after the prompts.
    """

    def __init__(
        self,
        layers: Sequence[AttentionSpec],
        prompts: Sequence[Tensor],
        kv_dtype: torch.dtype,
        recurrent: Sequence[RecurrentLayer] = (),
        settings: ProbeSettings | None = None,
        others: Sequence[Tensor] = (),
    ) -> None:
        settings = settings or ProbeSettings()
        self.num_prompts = len(prompts)
        prompts = [*prompts, *others]
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
        """The context of a batch with logits for every token of the prompts."""
        requests = [
            BatchRequest(
                self.prompts[p.prompt][p.start : p.end].tolist(), self.tables[p.prompt], p.start,
                p.end - p.start if p.prompt < self.num_prompts else 0, p.prompt + 1, length=len(self.prompts[p.prompt]),
            )
            for p in step.parts
        ]  # fmt: skip
        return ForwardContext(Batch.build(requests, self.page_size, self.device), self.pool, self.backend, self.states)


def rare_ids(tables: Iterable[Tensor], num_ids: int) -> list[int]:
    """Ids for which one of the model's own tables has an unusual row: random prompts would miss them.

    That is, a row unlike that of most ids in a table [ids, few numbers]; at most `MOST_RARE` ids."""
    found: dict[int, None] = {}
    for table in tables:
        if table.dim() == 0 or not FEWEST <= num_ids <= table.shape[0] or table.numel() > NARROW * table.shape[0] or table.is_complex():
            continue
        rows = table.detach()[:num_ids].reshape(num_ids, -1)
        rows = rows.to(torch.uint8) if rows.dtype == torch.bool else rows
        _, which, counts = torch.unique(rows, dim=0, return_inverse=True, return_counts=True)
        if counts.max() >= USUAL * num_ids and len(counts) > 1:
            others = (which != counts.argmax()).nonzero().flatten()
            found.update(dict.fromkeys(others[:: max(len(others) // MOST_RARE, 1)].tolist()))
    return list(found)[:MOST_RARE]


def with_rare_ids(prompts: Sequence[Tensor], rare: Sequence[int]) -> list[Tensor]:
    """The prompts with rare ids inserted: first in a prompt, first in its second half, and in between."""
    if not rare:
        return list(prompts)
    changed = [prompt.clone() for prompt in prompts]
    for number, prompt in enumerate(changed):
        at = sorted({0, max(len(prompt) // 2 - 1, 0), *range(2, len(prompt), 4)} if number else {0})
        prompt[at] = torch.tensor([rare[(number + i) % len(rare)] for i in range(len(at))], device=prompt.device)
    return changed
