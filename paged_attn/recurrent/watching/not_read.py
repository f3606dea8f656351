"""Arguments that a module with state in a cache is given and does not read, such as the mask that a model gives to all its layers alike.

Such an argument has neither a row per token nor the same size in all calls, so that no batch could pass it on; without it, the module runs
like any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_attn.attn_ops.model_code import model_may_fail
from paged_attn.calling.left_as_it_was import left_as_it_was
from paged_attn.recurrent.cache_state import CacheTemplate
from paged_attn.recurrent.watching.call_parts import operand_of, tensors_given
from paged_attn.recurrent.watching.watch import Call


def without_unread(call: Call, earlier: Call, template: CacheTemplate) -> frozenset[str]:
    """Sets those arguments of a call from an empty cache to None whose tensors have no known form, and without which the module gives the
    same rows and the same state. Returns their names. Whether it also does so from a state is for `verify.py`."""
    unread = set[str]()
    expected = [*_tensors(call.output), *template.read(template.present)]
    for name in {where.name for where, long, short in tensors_given(call, earlier) if operand_of(where, long, short) is None}:
        again = _without(call, name, template)
        if again is not None and len(again) == len(expected) and all(map(_equal, again, expected)):
            call.arguments[name] = None
            unread.add(name)
    return frozenset(unread)


def _without(call: Call, name: str, template: CacheTemplate) -> list[Tensor] | None:
    """What the module returns and keeps without this argument; None if it cannot do without."""
    cache = template.make(None)
    with model_may_fail():
        with left_as_it_was(call.module), torch.no_grad():
            output = call.module(**{**call.arguments, name: None, call.cache_name: cache})
        return [*_tensors(output), *template.read(cache)]
    return None


def _tensors(value: Any) -> list[Tensor]:
    parts = value if isinstance(value, (tuple, list)) else [value]
    return [part for part in parts if isinstance(part, Tensor)]


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.equal(other)
