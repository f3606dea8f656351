"""Makes rotary embeddings whose frequencies depend on the length of the call depend on the length of each row's request instead.

transformers' longrope (LongRoPE, arXiv:2402.13753; Phi-3 and 4, MiniCPM) uses one set of frequencies for calls up to some length, and
another for longer ones; its dynamic NTK scaling changes nothing up to the model's maximum position. Both look at the largest position of
the call, which in a paged batch may belong to another request. So each module is replaced by one that computes both sets and picks, for
each row, the one for its own request. It is compared with the module itself on both sides of the limit.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.model_code import model_may_fail
from paged_attn.attn_ops.ops.positions import REQUEST_LENGTHS
from paged_attn.calling.left_as_it_was import replaced_forward

logger = logging.getLogger("paged_attn")
LONGROPE, DYNAMIC = "longrope", "dynamic"
ORIGINAL = "original_max_position_embeddings"
SHORTEST = 5  # tokens of the compared call, besides those at the border


@dataclass(frozen=True)
class _Sides:
    """A module as it is in calls up to `border` tokens, and in longer ones; None: no request is longer."""

    border: int
    up_to: nn.Module
    beyond: nn.Module | None


class RopesByLength:
    """The rotary embeddings of a model, each with its sides: one, or one for each kind of layer.

    Attributes:
        borders: ascending; what a request's tokens had cached is of no use once it has more tokens than one of them.
        longest: how many tokens a request may have where no frequencies are known for more; None without limit.

    A module that computes anything else stays as it is; the self-check refuses what depends on another request.
    """

    def __init__(self, model: nn.Module) -> None:
        self._found = {module: (forward, sides) for module, forward in _followers(model) if (sides := _sides_of(module, forward))}
        every = [side for _, sides in self._found.values() for side in sides.values()]
        self.borders = tuple(sorted({side.border for side in every if side.beyond is not None}))
        self.longest = min((side.border for side in every if side.beyond is None), default=None)

    @contextmanager
    def by_request(self) -> Iterator[None]:
        """Inside, the modules compute what each row's request has; outside of forward contexts that is what they did before."""
        with ExitStack() as undo:
            for module, (forward, sides) in self._found.items():
                undo.enter_context(replaced_forward(module, _by_request(module, forward, sides)))
            yield


def _followers(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Modules whose frequencies transformers may change in a call, and their forward without that."""
    utilities = sys.modules.get("transformers.modeling_rope_utils")
    if utilities is None:
        return
    wrapper = utilities.dynamic_rope_update(lambda module, x, position_ids: None).__code__
    for module in model.modules():
        forward: Any = type(module).forward
        while forward is not None:
            inner = getattr(forward, "__wrapped__", None)
            if getattr(forward, "__code__", None) is wrapper:
                assert inner is not None
                yield module, inner
                break
            forward = inner


def _sides_of(module: Any, forward: Callable[..., Any]) -> dict[str | None, _Sides]:
    """By kind of layer, or under None where all have one; none if one of them computes anything else."""
    types: Any = getattr(module, "rope_type", None)
    found: dict[str | None, _Sides] = {}
    for kind, rope_type in types.items() if isinstance(types, Mapping) else [(None, types)]:
        if not isinstance(getattr(module, _name("original_inv_freq", kind), None), Tensor):
            continue  # the default ones, which nothing changes
        if rope_type == LONGROPE:
            possible = _longrope(module, kind)
        elif DYNAMIC in rope_type:
            possible = iter([_Sides(module.original_max_seq_len, _with(module, kind, _original(module, kind)), None)])
        else:
            continue
        same = next((sides for sides in possible if _computes_the_same(module, forward, kind, sides)), None)
        if same is None:
            return {}
        found[kind] = same
    return found


def _longrope(module: Any, kind: str | None) -> Iterator[_Sides]:
    """A module whose buffers were cast has the frequencies of long calls in their type, or, in older versions, as they were made."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = module.config.rope_parameters
    border = (parameters if kind is None else parameters[kind])[ORIGINAL]
    original, more = _original(module, kind), {} if kind is None else {"layer_type": kind}
    made: Tensor = ROPE_INIT_FUNCTIONS[LONGROPE](module.config, original.device, seq_len=border + 1, **more)[0]
    for frequencies in (made.to(original.dtype), made):
        setattr(module, _name("long_inv_freq", kind), frequencies)  # where a long call stores them too
        yield _Sides(border, _with(module, kind, original), _with(module, kind, frequencies))


def _original(module: nn.Module, kind: str | None) -> Tensor:
    found: Tensor = getattr(module, _name("original_inv_freq", kind))
    return found


def _with(module: nn.Module, kind: str | None, frequencies: Tensor) -> nn.Module:
    """The module, with these frequencies."""
    other = copy.copy(module)
    vars(other)["_buffers"] = {**module._buffers, _name("inv_freq", kind): frequencies}
    return other


def _name(attribute: str, kind: str | None) -> str:
    return attribute if kind is None else f"{kind}_{attribute}"


def _by_request(module: nn.Module, inner: Callable[..., Any], sides: Mapping[str | None, _Sides]) -> Callable[..., Any]:
    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        more = {} if layer_type is None else {"layer_type": layer_type}
        if layer_type not in sides:
            return inner(module, x, position_ids, **more)
        side = sides[layer_type]
        up_to = inner(side.up_to, x, position_ids, **more)
        if side.beyond is None:
            return up_to
        lengths = torch.empty(position_ids.shape[-1], dtype=torch.int64, device=position_ids.device)
        REQUEST_LENGTHS(position_ids, lengths)
        is_long = (lengths > side.border)[:, None]
        beyond = inner(side.beyond, x, position_ids, **more)
        if isinstance(up_to, Tensor):
            return torch.where(is_long, beyond, up_to)
        return tuple(torch.where(is_long, far, near) for near, far in zip(up_to, beyond, strict=True))

    return forward


@torch.no_grad()
def _computes_the_same(module: nn.Module, inner: Callable[..., Any], kind: str | None, side: _Sides) -> bool:
    """Whether both give the same bits on calls up to the border, and on one a token longer where there is another side."""
    ours, more = _by_request(module, inner, {kind: side}), {} if kind is None else {"layer_type": kind}
    device = _original(module, kind).device
    for length in {min(SHORTEST, side.border), side.border, side.border + (side.beyond is not None)}:
        x, positions = torch.zeros(1, 1, 1, device=device), torch.arange(length, device=device)[None]
        with model_may_fail() as failures:
            theirs = copy.deepcopy(module)(x, positions, **more)  # it keeps frequencies from call to call
            got = ours(x, positions, **more)
        if failures:
            logger.info("%s cannot be called by itself: %s", type(module).__name__, failures[0])
            return False
        pairs = [(theirs, got)] if isinstance(theirs, Tensor) else list(zip(theirs, got, strict=True))
        if not all(one.shape[-2] == length and torch.equal(one, other) for one, other in pairs):
            logger.info("%s computes something else in a call of %d tokens than its frequencies for it", type(module).__name__, length)
            return False
    return True


def dynamic_switches(model: nn.Module) -> str:
    """Words for a model that was refused for numbers that it makes of the length: its switches of dynamic NTK scaling that are on."""
    found = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if value is True and "dynamic" in name and "ntk" in name
    ]
    if not found:
        return ""
    return (
        f". {', '.join(found)} is True: once a call is longer than the model was trained for, dynamic NTK scaling takes a rotary base by "
        "its length, and so turns the keys of earlier tokens anew as a text grows. Up to that length the base is the usual one: the model "
        f"is served with the same tokens there after setting it to False (model.{found[0]} = False, or the config's entry before the "
        "model is made), with max_model_len for that length."
    )
