"""A batch as transformers' loop has it, column by column, from rows that come as they like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paged_attn.engine.llm import LLM
from paged_attn.engine.requests.outputs import TokenEvent
from paged_attn.engine.sampling_params import SamplingParams

Scores = Callable[[int], tuple[Tensor, ...] | None]


@dataclass
class Lockstep:
    """The k-th column is there when every row that goes on has its k-th new token; what a row has beyond the last column is dropped.

    Args:
        input_ids: [B, L] int64, padded; grows with every column.
        ends: token ids that end a row.
        pad: what a row that ended goes on with; None: nothing ends a row alone.
        criteria: other criteria of the call, a StoppingCriteriaList, or None.
        streamer: gets every column.
        scores: of so many columns, for the criteria.
    """

    input_ids: Tensor
    ends: frozenset[int]
    pad: int | None
    criteria: Any
    streamer: Any
    scores: Scores
    columns: int = 0
    _tokens: list[list[int]] = field(default_factory=list)
    _goes_on: list[bool] = field(default_factory=list)
    _ids: dict[int, str] = field(default_factory=dict)

    def run(self, llm: LLM, rows: list[list[int]], params: list[SamplingParams], max_new_tokens: int) -> Tensor:
        """[B, L + columns] int64: until every row has ended, or `max_new_tokens` columns are there."""
        self._tokens, self._goes_on = [[] for _ in rows], [True] * len(rows)
        if not max_new_tokens:
            return self.input_ids
        events: Iterator[TokenEvent] = llm.stream(rows, params)
        try:
            for event in events:
                self._ids[event.index] = event.request_id
                if event.token_id is not None:
                    self._tokens[event.index].append(event.token_id)
                while self._is_whole():
                    for row in self._add_column():
                        llm.cancel(self._ids[row])
                    if not any(self._goes_on) or self.columns == max_new_tokens:
                        return self.input_ids
        finally:
            events.close()  # type: ignore[attr-defined]
        raise AssertionError(f"rows of {[len(tokens) for tokens in self._tokens]} tokens ended before column {self.columns}")

    def _is_whole(self) -> bool:
        rows = zip(self._tokens, self._goes_on, strict=True)
        return all(len(tokens) > self.columns for tokens, goes_on in rows if goes_on or self.pad is None)

    def _add_column(self) -> list[int]:
        """Adds the next column; returns the rows that ended with it."""
        column, pad, before = self.columns, self.pad, list(self._goes_on)
        chosen = [tokens[column] if goes_on or pad is None else pad for tokens, goes_on in zip(self._tokens, self._goes_on, strict=True)]
        self.columns += 1
        added = torch.tensor(chosen)
        self.input_ids = torch.cat([self.input_ids, added.to(self.input_ids.device)[:, None]], 1)
        for row, token in enumerate(chosen):
            self._goes_on[row] = before[row] and token not in self.ends
        if self.criteria:
            done = self.criteria(self.input_ids, self.scores(self.columns)).tolist()
            self._goes_on = [goes_on and not ended for goes_on, ended in zip(self._goes_on, done, strict=True)]
        if self.streamer is not None:
            self.streamer.put(added)
        return [] if pad is None else [row for row in range(len(before)) if before[row] and not self._goes_on[row]]
