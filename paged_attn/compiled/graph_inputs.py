"""Fills a captured graph's flat inputs for a row of tokens, by the role of each input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError

PER_CALL = ("tokens", "input_ids", "position_ids", "logits_rows", "num_logits")


class GraphInputs:
    """The inputs of one graph with the model's own tensors bound.

    Args:
        roles: of `CallForm.roles`, in order.
        args: the inputs of some real call; parameters and buffers are taken from it, and kept alive.

    Raises:
        UnsupportedError: the graph takes an input that a row of tokens does not supply.
    """

    def __init__(self, roles: Sequence[str], args: Sequence[Any]) -> None:
        unknown = [role.removeprefix("call:") for role in roles if role not in PER_CALL and role != "owned"]
        if unknown:
            raise UnsupportedError(f"the graph takes {', '.join(unknown)}, which a paged batch does not have")
        self.roles = tuple(roles)
        self._args = list(args)
        self._open = [(index, role) for index, role in enumerate(roles) if role != "owned"]
        for index, _ in self._open:
            self._args[index] = None

    @property
    def takes_logits_rows(self) -> bool:
        return "logits_rows" in self.roles

    @property
    def all(self) -> list[Any]:
        """The model's own tensors in their places; None where a call gives something."""
        return list(self._args)

    @property
    def owned(self) -> list[Any]:
        """The model's own tensors among the inputs."""
        return [value for value, role in zip(self._args, self.roles, strict=True) if role == "owned"]

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype: that of most of its matrices, as some models return float32 logits."""
        dtypes = [t.dtype for t in self.owned if isinstance(t, Tensor) and t.is_floating_point() and t.dim() >= 2]
        return max(set(dtypes), key=dtypes.count) if dtypes else torch.float32

    def fill(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> list[Any]:
        """input_ids and positions [T], logits_rows [N], all int64 -> the flat inputs, rows as [1, T]."""
        values = {
            "tokens": input_ids.shape[0], "input_ids": input_ids[None], "position_ids": positions[None], "logits_rows": logits_rows,
            "num_logits": logits_rows.shape[0],
        }  # fmt: skip
        args = list(self._args)
        for index, role in self._open:
            args[index] = values[role]
        return args


def logits_of(output: Any) -> Tensor:
    """[N, vocabulary] from a graph's flat outputs: the first floating tensor [1, N, ...]."""
    tensors = output if isinstance(output, (tuple, list)) else (output,)
    logits: Tensor = next(t for t in tensors if isinstance(t, Tensor) and t.is_floating_point() and t.dim() >= 2)
    return logits[0] if logits.dim() == 3 else logits
