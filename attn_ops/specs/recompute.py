"""The spec of attention that is recomputed from all tokens of a request: values per token in pages, and a program over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.specs.attention import AttentionSpec


@dataclass(frozen=True)
class RowInput:
    """One tensor with a value per token, and how it is stored in pages as rows [T, width] and restored.

    Attributes:
        shape: of one token's part, without the token dim.
        token_dim: that dim's index in the tensor.
        order: the tensor's dims from the outermost to the innermost in memory, on which view operations may depend.
        dtype: of the tensor. Pages of a narrower type hold its bits, so that nothing is rounded.
        elements: how many elements of the pages one token takes.
    """

    shape: tuple[int, ...]
    token_dim: int
    order: tuple[int, ...]
    dtype: torch.dtype
    elements: int

    @property
    def width(self) -> int:
        return math.prod(self.shape)

    def stored(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [T, width] as elements [T, n] of pages of a dtype; n is `elements`, or less in pages of a wider type.

        Raises:
            ContextError: the layer was not laid out for pages of this dtype.
        """
        return rows.contiguous().view(dtype) if self._as_bits(dtype) else rows.to(dtype)

    def restored(self, elements: Tensor) -> Tensor:
        """The tensor, from elements [T, elements] of pages."""
        rows = elements.contiguous().view(self.dtype) if self._as_bits(elements.dtype) else elements[:, : self.width].to(self.dtype)
        value = rows.reshape(-1, *self.shape).movedim(0, self.token_dim)
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return value.permute(self.order).contiguous().permute(back)

    def _as_bits(self, dtype: torch.dtype) -> bool:
        if dtype.itemsize >= self.dtype.itemsize or self.elements == self.width:
            return False
        if dtype.itemsize * self.elements != self.dtype.itemsize * self.width:
            raise ContextError(
                f"the pages hold {dtype}, for which {self.width} values of {self.dtype} were not laid out ({self.elements} elements); "
                "allocate the pool with the model's dtype"
            )
        return True


# (number of tokens, the rows' tensors, the operands) -> [tokens, heads, v_dim].
RowProgram = Callable[[int, Sequence[Tensor], Sequence[Tensor]], Tensor]


@dataclass(frozen=True, kw_only=True)
class RecomputeSpec(AttentionSpec):
    """An attention that no backend supports: its program runs on all tokens of a request, or on the last ones where no more are needed, and
    the new tokens' rows are the result.

    For the pool it is a layer with one KV head, whose K holds the `rows` and whose V is empty. No backend is asked about it.

    Attributes:
        rows: the program's inputs per token, in the order of their elements in K.
        min_tokens: the fewest tokens that the program may run on, because its trace does not hold for fewer.
        reach: how many tokens before a token its result is made of; None if all may be.
        joined: whether, with a `reach`, requests may follow each other in one run, each with so many of its own tokens before its new ones.
        chooses: how many of the keys that it ranks a query takes (the fewest, if it ranks several times); None if it ranks none.
        computes: equal for programs that compute the same from operands of the same kinds.
        program: what is run.
    """

    rows: tuple[RowInput, ...]
    min_tokens: int
    reach: int | None = None
    joined: bool = False
    chooses: int | None = None
    computes: str = field(repr=False)
    program: RowProgram = field(compare=False, repr=False)

    @property
    def by_backend(self) -> bool:
        return False

    def describe(self) -> str:
        """`4 heads, causal, recomputed from all tokens: 132 values a token`."""
        values = sum(row.width for row in self.rows)
        tokens = "all tokens" if self.reach is None else f"a new one and {self.reach} before it"
        return f"{self.num_q_heads} heads, causal, recomputed from {tokens}: {values} values a token"
