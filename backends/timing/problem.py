"""A problem to time, and the fewest bytes and operations that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from paged_attn.attn_ops.kv.layer_groups import Retention
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.capabilities import Problem
from paged_attn.backends.devices import architecture_of, device_word

LLAMA_8B = AttentionSpec(32, 8, 128, 128, scale=128**-0.5)  # a layer of Llama 3.1 8B


@dataclass(frozen=True)
class TimedProblem:
    """One layer of one step. `requests`: (cached, new) tokens of each; in a problem of kind "decode" each has one new token.

    K and V have the dtype of the queries. All requests share their first `shared` tokens, in the same pages.

    Raises:
        ValueError: no requests; a request without a new token; a decode without context or with several new tokens; shared tokens that end
            within a page, or that some request has not cached.
    """

    kind: Literal["decode", "prefill"]
    requests: tuple[tuple[int, int], ...]
    spec: AttentionSpec = LLAMA_8B
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    shared: int = 0

    def __post_init__(self) -> None:
        decode = self.kind == "decode"
        wrong = [r for r in self.requests if r[0] < decode or r[1] < 1 or (decode and r[1] > 1)]
        if self.kind not in ("decode", "prefill") or not self.requests or wrong:
            raise ValueError(
                f"a timed problem of kind {self.kind!r} has {len(self.requests)} requests, of which (cached, new) {wrong[:3]} are invalid; "
                "allowed are 'decode' with at least one cached and one new token each, and 'prefill' with at least one new token each"
            )
        fewest = min(cached for cached, _ in self.requests)
        if self.shared % self.page_size or not 0 <= self.shared <= fewest:
            raise ValueError(
                f"{self.shared} tokens cannot be shared by requests of {fewest} cached tokens or more; allowed are multiples of the "
                f"page size, {self.page_size}, that all have cached"
            )

    def layer_problem(self, device: torch.device) -> Problem:
        """The problem for `capabilities.unmet`."""
        phases = frozenset({"decode" if self.kind == "decode" else "extend"})
        word = device_word(device)
        return Problem(self.spec, self.dtype, self.dtype, self.page_size, word, architecture_of(device), phases=phases)

    @property
    def num_tokens(self) -> int:
        return sum(new for _, new in self.requests)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all KV of the requests, visible or not; shared tokens count once."""
        return (sum(cached + new for cached, new in self.requests) - self._again) * self._token_bytes

    @property
    def bytes_written(self) -> int:
        """K and V of the new tokens, read once and written once."""
        return 2 * self.num_tokens * self._token_bytes

    def bytes_moved(self, with_write: bool = False) -> int:
        """KV that any query sees, queries and output, each once. Shared tokens count as seen by all requests, whatever the window."""
        seen = sum(int(last.max() - first.min()) + 1 for first, last in map(self._view, self.requests))
        seen -= self._again
        rows = self.num_tokens * self.spec.num_q_heads * self._dims * self.dtype.itemsize
        return seen * self._token_bytes + rows + (self.bytes_written if with_write else 0)

    @property
    def flops(self) -> int:
        """Two operations per multiplication of q.k and of p.v, per visible (query, key) pair."""
        pairs = sum(int((last - first + 1).sum()) for first, last in map(self._view, self.requests))
        return 2 * self._dims * self.spec.num_q_heads * pairs

    @property
    def _again(self) -> int:
        return self.shared * (len(self.requests) - 1)

    @property
    def _token_bytes(self) -> int:
        return self.spec.num_kv_heads * self._dims * self.dtype.itemsize

    @property
    def _dims(self) -> int:
        return self.spec.qk_head_dim + self.spec.v_head_dim

    def _view(self, request: tuple[int, int]) -> tuple[NDArray[Any], NDArray[Any]]:
        """First and last key that each of a request's queries sees."""
        spec, end = self.spec, sum(request)
        query = np.arange(request[0], end)
        last = query if spec.causal else np.full_like(query, end - 1)
        if spec.chunk is not None:
            last = np.minimum(last, query // spec.chunk * spec.chunk + spec.chunk - 1)
        return Retention(spec.sliding_window, spec.chunk).first(query), last
