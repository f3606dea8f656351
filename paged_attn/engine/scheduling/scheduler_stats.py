"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SchedulerStats:
    """Counters since the engine was made.

    Attributes:
        admitted: requests that began to run, each once.
        queue_seconds, longest_queue_seconds: wall time that those waited before: the sum, and the longest.
        prompt_tokens: of those.
        prompt_tokens_cached: of these, how many came from the prefix cache.
        prompt_tokens_without_state: how many the prefix cache had besides, of no use as no recurrent state was kept there.
        preemptions: how often a running request lost its pages and had to wait again.
        held_back: how often a request was made to wait for another that computes the same prefix.
    """

    admitted: int = 0
    queue_seconds: float = 0.0
    longest_queue_seconds: float = 0.0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_without_state: int = 0
    preemptions: int = 0
    held_back: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that came from the prefix cache; 0 before any prompt."""
        return self.prompt_tokens_cached / self.prompt_tokens if self.prompt_tokens else 0.0

    def count_admission(self, waited: float, prompt_tokens: int, cached: int, without_state: int) -> None:
        self.admitted += 1
        self.queue_seconds += waited
        self.longest_queue_seconds = max(self.longest_queue_seconds, waited)
        self.prompt_tokens += prompt_tokens
        self.prompt_tokens_cached += cached
        self.prompt_tokens_without_state += without_state
