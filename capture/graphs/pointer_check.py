"""Checks that tensors that captured graphs read by address still belong to the model and have not moved."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

from torch import Tensor, nn

from paged_attn.attn_ops.errors import CaptureError


class PointerCheck:
    """Remembers the parameters of a model, and those of its buffers whose memory is that of a tensor in `bound`.

    `check` compares each by its name in the module and by address, so it notices tensors that were replaced, moved or converted to another
    dtype. Writing numbers in place is allowed.
    """

    def __init__(self, model: nn.Module, bound: Iterable[Tensor] = ()) -> None:
        # Trap: by address. A tensor that torch.compile bound to a buffer need not be the same object.
        known = {tensor.data_ptr() for tensor in bound if tensor.numel()}
        self._tables: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._names: list[str] = []
        for prefix, module in model.named_modules():
            for table, chosen in ((module._parameters, None), (module._buffers, known)):
                for name, tensor in table.items():
                    if tensor is not None and (chosen is None or tensor.data_ptr() in chosen):
                        self._tables.append(table)
                        self._keys.append(name)
                        self._names.append(f"{prefix}.{name}" if prefix else name)
        self._tensors: list[Tensor] = list(map(dict.__getitem__, self._tables, self._keys))
        self._pointers = [tensor.data_ptr() for tensor in self._tensors]

    def __len__(self) -> int:
        return len(self._names)

    def check(self) -> None:
        """Raises CaptureError naming the first tensor that has changed."""
        now = list(map(dict.get, self._tables, self._keys))  # maps: every captured step waits for this
        if not all(map(is_, now, self._tensors)) or list(map(Tensor.data_ptr, self._tensors)) != self._pointers:
            self._refuse(now)

    def _refuse(self, now: list[Any]) -> None:
        for name, was, tensor, pointer in zip(self._names, self._tensors, now, self._pointers, strict=True):
            if tensor is was and tensor.data_ptr() == pointer:
                continue
            what = "is gone" if tensor is None else "was replaced by another tensor" if tensor is not was else "moved to another address"
            raise CaptureError(
                f"{name} {what} since the graphs were captured; a replay would read the old memory. Write new weights in place "
                "(load_state_dict or copy_ do), or make a new LLM for the changed model. Nothing was computed."
            )
