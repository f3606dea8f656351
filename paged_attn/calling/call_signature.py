"""How a model's forward is called: the name of its token argument, and whether it takes position_ids."""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.errors import UnsupportedError

FEW_IDS = 6
TARGETS = ("targets", "target", "labels", "y")
_target_of: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_EMPTY = inspect.Parameter.empty


def _called(model: nn.Module) -> nn.Module:
    """What a wrapper's forward(*args, **kwargs) hands its arguments to, as nn.DataParallel's: its one child; any other model itself."""
    parameters, children = inspect.signature(model.forward).parameters, list(model.children())
    is_wrapper = parameters and all(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values())
    return _called(children[0]) if is_wrapper and len(children) == 1 else model


def takes(model: nn.Module, name: str) -> bool:
    """Whether forward accepts this keyword, if only among others in **kwargs.

    Where **kwargs lead is not to be seen: they count for models with a config, which pass such keywords on, and for wrappers that take
    nothing else.
    """
    model = _called(model)
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    takes_no_other = all(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values())
    return name in parameters or (takes_any and (hasattr(model, "config") or takes_no_other))


def token_argument(model: nn.Module) -> str:
    """input_ids where forward takes it, else its first parameter (`idx`, `tokens`). Raises UnsupportedError: forward has no parameter for
    tokens, or needs others besides tokens and position_ids."""
    model = _called(model)
    parameters = inspect.signature(model.forward).parameters
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if "input_ids" in parameters or (not named and takes(model, "input_ids")):
        token = "input_ids"
    elif named and named[0].kind is not inspect.Parameter.POSITIONAL_ONLY and named[0].name != "position_ids":
        token = named[0].name
    else:
        raise UnsupportedError(
            f"{type(model).__name__}.forward takes ({', '.join(parameters)}); known is a forward whose token ids are called input_ids, "
            "or are the first parameter"
        )
    needed = [p.name for p in named if p.default is _EMPTY and p.name not in (token, "position_ids")]
    if needed:
        raise UnsupportedError(
            f"{type(model).__name__}.forward needs {', '.join(needed)} besides {token}; serving has token ids and position_ids alone"
        )
    return token


def positions_are_optional(model: nn.Module) -> bool:
    """Whether forward may be called with position_ids and also without."""
    parameter = inspect.signature(_called(model).forward).parameters.get("position_ids")
    return takes(model, "position_ids") if parameter is None else parameter.default is not _EMPTY


def input_embeddings(model: Any) -> Any:
    """None where there are none, or where transformers does not find them."""
    try:
        return model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    except NotImplementedError:
        return None


def few_ids(model: nn.Module, count: int, device: torch.device) -> Tensor:
    """Token ids [count] int64 for a call whose numbers do not matter, as far as the model has so many: 0, 1, ... 5, 0, ..."""
    found = input_embeddings(model)
    tables = [found] if isinstance(found, nn.Embedding) else [each for each in model.modules() if isinstance(each, nn.Embedding)]
    return torch.arange(count, device=device) % min((FEW_IDS, *(table.num_embeddings for table in tables)))


def target_arguments(model: nn.Module) -> list[str]:
    """Parameters that take what a model is trained to say, and may be left out."""
    parameters = inspect.signature(_called(model).forward).parameters
    return [name for name in TARGETS if name in parameters and parameters[name].default is not _EMPTY]


def call_with_targets(model: nn.Module, name: str) -> None:
    """From now on `plain_inputs` has the tokens as targets, too: this model gives other logits than the last token's in training only."""
    _target_of[model] = name


def plain_inputs(model: nn.Module, prompt: Tensor, positions: bool = False) -> dict[str, Any]:
    """The inputs of a prompt [T] as a user gives them: position_ids only where forward insists on them, or where asked for; and the tokens
    once more as targets, where that is how the model is brought to give the logits of all."""
    inputs: dict[str, Any] = {token_argument(model): prompt[None]}
    if model in _target_of:
        inputs[_target_of[model]] = inputs[token_argument(model)]
    if takes(model, "position_ids") and (positions or not positions_are_optional(model)):
        inputs["position_ids"] = torch.arange(len(prompt), device=prompt.device)[None]
    return inputs
