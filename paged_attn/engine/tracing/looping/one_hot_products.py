"""Finds the products with experts' weights while a block runs, whatever function computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from paged_attn.engine.tracing.looping.tape import Tape, tensors_in

PRODUCTS = frozenset({
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "grouped_mm", "_grouped_mm",
})  # fmt: skip


class OneHotProducts(TorchFunctionMode):
    """Inside, products with the second weights, or with what is made of these alone, are taken of ones in place of what is given.

    Args:
        first, second, biases: weights of the first and the second product, and what is added to the second.
        hidden: the width of the rows that first products are given, which are noted in `fed`.
        tape: is told that what these products give comes from experts. It must be entered before.
    """

    def __init__(
        self, first: Sequence[Tensor], second: Sequence[Tensor], biases: Sequence[Tensor], hidden: int, tape: Tape, fed: list[Tensor]
    ) -> None:
        super().__init__()
        self._first, self._second, self._biases = ({id(each): each for each in group} for group in (first, second, biases))
        self._hidden, self._tape, self._fed = hidden, tape, fed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        is_product = getattr(func, "__name__", "") in PRODUCTS
        if is_product and any(id(each) in self._second for each in given):
            kept = self._second.keys() | self._biases.keys()
            with self._tape.expert() as taken:
                args, kwargs = map_aggregate(
                    (tuple(args), dict(kwargs)),
                    lambda each: torch.ones_like(each) if isinstance(each, Tensor) and id(each) not in kept else each,
                )
                return taken(func(*args, **kwargs))
        if is_product and any(id(each) in self._first for each in given):
            with self._tape.expert() as taken:
                rows = [each for each in given if id(each) not in self._first and each.shape[-1:] == (self._hidden,)]
                self._fed.extend(each.detach().reshape(-1, self._hidden).clone() for each in rows)
                return taken(func(*args, **kwargs))
        result = func(*args, **kwargs)
        made_of = tensors_in(args[:1])  # x.type_as(weight) is not made of the weight
        for group in (self._first, self._second, self._biases):
            if any(id(each) in group for each in made_of):
                group.update((id(each), each) for each in tensors_in(result))
        return result
