"""How far back the rows of a program reach: a convolution needs a few tokens, not all of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.model_code import model_code
from paged_attn.attn_ops.specs.recompute import RowInput, RowProgram
from paged_attn.passes.fx.slicing import operation_limit

MOST = 16  # tokens; a decay that is longer leaves a trace in the bits of a row so far behind


def reach_of(
    program: RowProgram, rows: Sequence[RowInput], owned: Sequence[Tensor], total: int, least: int, device: torch.device,
    other: Callable[[], RowProgram] | None = None,
) -> int | None:  # fmt: skip
    """How many tokens before a token its result is made of, if these are at most MOST; None if there are more.

    A token that is NaN makes NaN of all that is computed from it, whatever its share; all other rows must keep their bits. Then the program
    must give the same rows from a later token on, where it knows neither those before nor their number. Tried on tokens that differ, and
    on tokens that are nearly alike, of which each, or none, is chosen where a module chooses tokens; and with other weights.

    Args:
        total: tokens of the longest call that is tried. least: the fewest tokens that the program may run on.
        other: makes the program with other weights, given these.
    """
    generator, found = torch.Generator().manual_seed(17), 0
    some, one = ([torch.randn(count, row.width, generator=generator) for row in rows] for count in (total, 1))
    alike = [[sign * same + 0.01 * each for same, each in zip(one, some, strict=True)] for sign in (10, -10)]
    calls: list[tuple[Callable[[], RowProgram], list[Tensor]]] = [(lambda: program, given) for given in (some, *alike)]
    calls += [] if other is None else [(other, some)]
    try:
        for make, given in calls:
            tried = _Tried(make(), rows, owned, [each.to(device, row.dtype) for each, row in zip(given, rows, strict=True)])
            found = max(found, tried.reach(total))
            if found > MOST or not tried.runs_from_later_on(total, found, least):
                return None
    except UnsupportedError:  # it runs on the whole of a call only
        return None
    return found


class _Tried:
    """A program on given rows, one tensor [T, width] for each of its inputs."""

    def __init__(self, program: RowProgram, rows: Sequence[RowInput], owned: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        self.program, self.rows, self.owned, self.given = program, rows, owned, given
        self.whole = self.run(0, len(given[0]))

    def run(self, first: int, end: int, without: int | None = None) -> Tensor:
        """Its results for the tokens from `first` to `end`, of which one may be NaN; UnsupportedError if it cannot run."""
        parts = [each[first:end].clone() for each in self.given]
        for part in parts if without is not None else ():
            part[without] = torch.nan
        with model_code(UnsupportedError), torch.no_grad():
            restored = [row.restored(part) for row, part in zip(self.rows, parts, strict=True)]
            return self.program(end - first, restored, self.owned).float()

    def reach(self, total: int) -> int:
        """More than MOST as soon as that is seen."""
        found = 0 if bool(self.whole.isfinite().all()) else MOST + 1
        for without in _spread(total):
            if found <= MOST:
                changed = (self.whole != self.run(0, total, without)).flatten(1).any(1).nonzero().flatten().tolist()
                found = max(found, changed[-1] - without if changed[0] >= without else MOST + 1) if changed else found
        return found

    def runs_from_later_on(self, total: int, reach: int, least: int) -> bool:
        limit = operation_limit(self.whole, *(row.dtype for row in self.rows))
        for more in (1, 2, 5, MOST + 1):
            count = max(reach + more, least)
            for end in {min(count + start, total) for start in _spread(total)}:
                got = self.run(end - count, end)[reach:]
                if not torch.allclose(got, self.whole[end - count + reach : end], rtol=0, atol=limit):
                    return False
        return True


def _spread(total: int) -> list[int]:
    """Tokens of a call: first ones, some in between, and some near its end."""
    return [0, 1, 2, 7, total // 3, total // 2 + 1, total - 2 * MOST, total - 3]
