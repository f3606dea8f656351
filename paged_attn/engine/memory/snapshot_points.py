"""After which tokens of a prompt its recurrent state is worth a snapshot."""

from __future__ import annotations

MIN_FORK = 16  # tokens that a state at a fork must save to be worth a snapshot
SHARE = 8  # one prompt leaves at most one of so many slots for snapshots at regular distances


class SnapshotPoints:
    """Numbers of tokens, all whole pages.

    Args:
        interval: tokens between states of a long prompt, rounded up to whole pages; 0: none but at its end and at forks.
        slots: for snapshots, in all. The interval of a prompt is doubled until it leaves no more than its share of them, so that equal
            beginnings of prompts have states at equal places.
    """

    def __init__(self, page_size: int, interval: int, slots: int) -> None:
        self.page_size, self._most = page_size, slots // SHARE
        self._interval = -(-interval // page_size) * page_size if self._most else 0

    def of(self, num_tokens: int, start: int, fork: int) -> tuple[list[int], set[int]]:
        """For a request of so many tokens that starts from the state after `start` of them: all points, ascending, and which of them are
        only regular ones.

        The others are the last page boundary before its final token, and `fork`, where it leaves what is cached without a state.
        """
        last = (num_tokens - 1) // self.page_size * self.page_size
        wanted = {last} if last > start else set[int]()
        if fork - start >= MIN_FORK:
            wanted.add(fork)
        regular = set[int]()
        if self._interval:
            distance = self._interval
            while last // distance - start // distance > self._most:
                distance *= 2
            regular.update(range((start // distance + 1) * distance, last, distance))
        return sorted(wanted | regular), regular - wanted
