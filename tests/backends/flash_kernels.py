"""What FlashAttention's kernels compute, in plain PyTorch on the CPU: for fake packages that check how a backend calls the real ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NAN = float("nan")


@dataclass(frozen=True)
class Rules:
    """How scores are made and which are seen, in FlashAttention's words: `left` and `right` are inclusive, -1 for no bound."""

    scale: float
    causal: bool
    left: int = -1
    right: int = -1
    chunk: int = 0
    softcap: float = 0.0
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    alibi_by_key: bool = False  # slope * j in place of -slope * |i - j|: the same weights, another log-sum-exp


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, q_starts: list[int], k_lens: list[int], table: Tensor, rules: Rules, out: Tensor,
    *, whole_pages: bool = False,
) -> Tensor:  # fmt: skip
    """q [T, heads, dim], k and v [pages, page_size, kv_heads, dim]; writes the rows of `out` that q_starts cover.

    Returns the log-sum-exp [heads, T], NaN in other rows. With `whole_pages`, unused slots of a request's last page are read, too, and
    weighed with zero, as kernels do that load whole blocks.
    """
    lse = torch.full((q.shape[1], q.shape[0]), NAN)
    group, page_size = q.shape[1] // k.shape[2], k.shape[1]
    for request, length in enumerate(k_lens):
        rows = slice(q_starts[request], q_starts[request + 1])
        count = rows.stop - rows.start
        if not count:
            continue
        pages = table[request, : -(-length // page_size)].long()
        keys, values = (t[pages].flatten(0, 1).float().repeat_interleave(group, dim=1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[rows].float(), keys[:length]) * rules.scale
        if rules.softcap > 0:
            scores = rules.softcap * torch.tanh(scores / rules.softcap)
        i, j = torch.arange(length - count, length)[:, None], torch.arange(length)
        if rules.slopes is not None:
            places = j if rules.alibi_by_key else -(i - j).abs()
            scores = scores + rules.slopes[:, None, None] * places
        scores = scores.masked_fill(~_seen(i, j, rules), -math.inf)
        if rules.sinks is not None:
            scores = torch.cat([scores, rules.sinks.float()[:, None, None].expand(-1, count, 1)], dim=-1)
        lse[:, rows] = torch.logsumexp(scores, dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :length]
        if whole_pages:
            weights = torch.nn.functional.pad(weights, (0, values.shape[0] - length))
        out[rows] = torch.einsum("hij,jhd->ihd", weights, values[: weights.shape[-1]]).to(out.dtype)
    return lse


def _seen(i: Tensor, j: Tensor, rules: Rules) -> Tensor:
    right = 0 if rules.causal else rules.right
    seen = torch.ones(i.shape[0], j.shape[0], dtype=torch.bool)
    if rules.left >= 0:
        seen &= j >= i - rules.left
    if right >= 0:
        seen &= j <= i + right
    return seen & (j // rules.chunk == i // rules.chunk) if rules.chunk else seen


def check(condition: bool, message: str) -> None:
    """As TORCH_CHECK does."""
    if not condition:
        raise RuntimeError(message)


def check_loads(*tensors: Tensor) -> None:
    """The kernels load and store 16 bytes at a time and check only that the last dim is contiguous."""
    for tensor in tensors:
        check(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        unit = 16 // tensor.element_size()
        moved = [s for s, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1]
        assert all(s % unit == 0 for s in moved) and tensor.data_ptr() % 16 == 0, "misaligned address"
