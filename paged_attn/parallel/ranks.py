"""The ranks of one sharded model: agreeing on numbers and steps, and detecting divergence."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paged_attn.attn_ops.batch.batch import RequestColumns

DIGEST_BITS = 62  # so that the negated digest also fits an int64
_controls: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


class DivergedError(RuntimeError):
    """The ranks of a sharded model were about to compute different things. No rank continues."""


class Ranks:
    """The ranks of one tensor-parallel group. Each method that talks to the others must be called by all of them, in the same order.

    Control messages go over gloo on the CPU, so that they neither wait for the device nor enter a captured graph.

    Args:
        group: the ranks that hold the shards.

    Attributes:
        rank, size: this process's rank in the group, and the number of ranks.
        name: the group's name, for functional collectives.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.name = group, group.group_name
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        members = dist.get_process_group_ranks(group)
        self.leader = members[0]
        if group not in _controls:  # one for all engines: creating and destroying one involves all ranks
            _controls[group] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        self._control = _controls[group]

    def least(self, number: int) -> int:
        """The smallest `number` of all ranks."""
        least = torch.tensor(number)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._control)
        return int(least)

    def least_of(self, count: Callable[[int], int]) -> Callable[[int], int]:
        """`count` with the smallest result of all ranks."""
        return lambda argument: self.least(count(argument))

    def all_say(self, yes: bool) -> bool:
        """Whether every rank says yes."""
        return bool(self.least(int(yes)))

    def any_says(self, yes: bool) -> bool:
        """Whether some rank says yes."""
        return not self.all_say(not yes)

    def check_settings(self, settings: str) -> None:
        """Raises DivergedError, on every rank, unless all ranks give the same."""
        self._compare("the engine's settings", settings.encode())()

    def compare_step(self, requests: RequestColumns) -> Callable[[], None]:
        """Start to compare the next step over all ranks. Call the returned function before computing it: it waits for the result, and
        raises DivergedError, on every rank, if the steps differ."""
        return self._compare("the next step", _signature(requests))

    def _compare(self, what: str, data: bytes) -> Callable[[], None]:
        digest = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> (64 - DIGEST_BITS)
        extremes = torch.tensor([digest, -digest])
        asked = self._among_ranks(what, lambda: dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._control, async_op=True))

        def settle() -> None:
            self._among_ranks(what, asked.wait)
            largest, smallest = extremes.tolist()
            if largest != -smallest:
                raise DivergedError(
                    f"the {self.size} ranks of this model do not agree on {what} (this is rank {self.rank}). Under tensor parallelism "
                    "every rank runs the same program: the same settings, the same requests in the same order and as many steps. Nothing "
                    "was computed."
                )

        return settle

    def _among_ranks(self, what: str, talk: Callable[[], Any]) -> Any:
        try:
            return talk()
        except RuntimeError as error:
            raise DivergedError(
                f"rank {self.rank} of {self.size} waited for the others to compare {what}, and one of them is gone or busy with something "
                f"else: {error}"
            ) from error

    def take_first(self, tensor: Tensor) -> None:
        """Overwrite the tensor on all ranks with the first rank's; on a GPU this is enqueued, and nothing waits for it."""
        dist.broadcast(tensor, self.leader, group=self.group)


def _signature(columns: RequestColumns) -> bytes:
    """Everything that a step depends on, except pages before a request's last one, which were in the signatures of earlier steps."""
    last_pages = columns.page_table[np.arange(len(columns)), columns.num_pages - 1]
    if columns.group_tables is not None:
        last_pages = np.append(last_pages, columns.group_tables[:, np.arange(len(columns)), columns.num_pages - 1])
    numbers = (columns.num_cached, columns.num_logits, columns.num_new, columns.num_pages, last_pages, columns.tokens)
    return np.concatenate(numbers if columns.lengths is None else (*numbers, columns.lengths)).tobytes()
