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

    `ragged`: it reads the step's own K and V, not the pool's. `any_strides`: it can write outputs that are not contiguous.
    """

    wrapper: Any
    kind: Kind
    ragged: bool = False
    any_strides: bool = False

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor | None, sinks: Tensor | None) -> None:
        """query [rows, q_heads, dim]; key and value of the pool, or of the rows if ragged; output as query; lse [rows, q_heads]."""
        target = writable(output, query.dtype, self.any_strides)
        sums = lse if lse is None or lse.is_contiguous() else torch.empty_like(lse, memory_format=torch.contiguous_format)
        self._run(readable(query), key, value, target, sums, sinks)
        if target is not output:
            output.copy_(target)
        if lse is not None and sums is not None and sums is not lse:
            lse.copy_(sums)

    def _run(self, query: Tensor, key: Tensor, value: Tensor, target: Tensor, sums: Tensor | None, sinks: Tensor | None) -> None:
        operands = (readable(key), readable(value)) if self.ragged else ((key, value),)
        extra = () if sinks is None else (sinks.float().contiguous(), self.kind.scale)  # the sink kernel takes its scale here
        self.wrapper.run(query, *operands, *extra, out=target, lse=sums, return_lse=sums is not None)


@dataclass(slots=True)
class LatentLaunch(Launch):
    """A launch for rows of latents: keys [pages, page_size, 1, rank + rotated], whose first `rank` elements are the values; output
    [rows, q_heads, rank]. Queries and rows are passed as views of their two parts."""

    any_strides: bool = True

    def _run(self, query: Tensor, key: Tensor, value: Tensor, target: Tensor, sums: Tensor | None, sinks: Tensor | None) -> None:
        rank = self.kind.rank
        self.wrapper.run(
            query[..., :rank], query[..., rank:], value[:, :, 0], key[:, :, 0, rank:], out=target, lse=sums, return_lse=sums is not None
        )


@dataclass(slots=True)
class Cascade:
    """Attends to a prefix that all requests share, to the rest of each request, and merges both."""

    prefix: Launch
    rest: Launch
    merge: Any  # flashinfer.merge_state_in_place

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor | None, sinks: Tensor | None) -> None:
        shape, dtype = output.shape, query.dtype
        whole = writable(output, dtype)
        part = torch.empty(shape, dtype=dtype, device=query.device)
        sums = torch.empty(2, *shape[:2], dtype=torch.float32, device=query.device)
        self.rest(query, key, value, whole, sums[0], None)
        self.prefix(query, key, value, part, sums[1], None)
        self.merge(whole, sums[0], part, sums[1])
        if whole is not output:
            output.copy_(whole)
        if lse is not None:
            lse.copy_(sums[0])


def writable(output: Tensor, dtype: torch.dtype, any_strides: bool = False) -> Tensor:
    """The output, or a new tensor if a kernel for `dtype` cannot write it: most assume that it is contiguous, without checking."""
    fits = output.dtype == dtype and is_vectored(output) and (any_strides or output.is_contiguous())
    return output if fits else torch.empty(output.shape, dtype=dtype, device=output.device)


def readable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its rows or heads do not start at multiples of 16 bytes."""
    return tensor if is_vectored(tensor) else tensor.clone(memory_format=torch.contiguous_format)
