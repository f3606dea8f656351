"""Planned launches: what a layer of one kind calls in one step. All log-sum-exps in here are FlashInfer's, of base 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_attn.backends.attention.flashinfer.kinds import Kind, is_vectored


@dataclass(slots=True)
class Launch:
    """One planned wrapper.

    `ragged`: it reads the step's own K and V, not the pool's. `any_strides`: it writes outputs that are not contiguous.
    """

    wrapper: Any
    kind: Kind
    ragged: bool = False
    any_strides: bool = False

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor | None, sinks: Tensor | None) -> None:
        """Attend: query [rows, q_heads, dim]; key and value of the pool, or of the rows if ragged; output as query; lse [rows, q_heads]."""
        target = output if self._writes(output, query) else _new(output, query.dtype)
        sums = lse if lse is None or lse.is_contiguous() else _new(lse, lse.dtype)
        operands = (readable(key), readable(value)) if self.ragged else ((key, value),)
        extra = () if sinks is None else (sinks.float().contiguous(), self.kind.scale)  # the sink kernel takes its scale here
        self.wrapper.run(readable(query), *operands, *extra, out=target, lse=sums, return_lse=lse is not None)
        if target is not output:
            output.copy_(target)
        if lse is not None and sums is not None and sums is not lse:
            lse.copy_(sums)

    def _writes(self, output: Tensor, query: Tensor) -> bool:
        """Whether the kernel can write there: all but "fa3" take every output for contiguous, without a check."""
        return output.dtype == query.dtype and is_vectored(output) and (self.any_strides or output.is_contiguous())


@dataclass(slots=True)
class LatentLaunch:
    """One planned wrapper for rows of latents: keys [pages, page_size, 1, rank + rotated], whose first `rank` elements are the values."""

    wrapper: Any
    kind: Kind

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor | None, sinks: Tensor | None) -> None:
        """As `Launch`, with output [rows, q_heads, rank]. Queries and rows go in as views of their two parts."""
        query, rank = readable(query), self.kind.rank
        target = output if output.dtype == query.dtype and is_vectored(output) else _new(output, query.dtype)
        sums = lse if lse is None or lse.is_contiguous() else _new(lse, lse.dtype)
        self.wrapper.run(
            query[..., :rank], query[..., rank:], value[:, :, 0], key[:, :, 0, rank:], out=target, lse=sums, return_lse=lse is not None
        )
        if target is not output:
            output.copy_(target)
        if lse is not None and sums is not None and sums is not lse:
            lse.copy_(sums)


@dataclass(slots=True)
class Cascade:
    """Attend to a prefix that all requests share once, to what each has besides, and merge both."""

    prefix: Launch
    rest: Launch
    merge: Any  # flashinfer.merge_state_in_place

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor | None, sinks: Tensor | None) -> None:
        """As `Launch`."""
        shape, dtype = output.shape, query.dtype
        direct = output.is_contiguous() and output.dtype == dtype and is_vectored(output)
        whole = output if direct else torch.empty(shape, dtype=dtype, device=query.device)
        part = torch.empty(shape, dtype=dtype, device=query.device)
        sums = torch.empty(2, *shape[:2], dtype=torch.float32, device=query.device)
        self.rest(query, key, value, whole, sums[0], None)
        self.prefix(query, key, value, part, sums[1], None)
        self.merge(whole, sums[0], part, sums[1])
        if not direct:
            output.copy_(whole)
        if lse is not None:
            lse.copy_(sums[0])


def _new(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)


def readable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its rows or heads do not start at multiples of 16 bytes."""
    return tensor if is_vectored(tensor) else tensor.clone(memory_format=torch.contiguous_format)
