"""Gets one row of logits for each prompt token from a model called as its users call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.model_code import model_code
from paged_attn.calling.call_signature import call_with_targets, plain_inputs, target_arguments
from paged_attn.calling.left_as_it_was import left_as_it_was
from paged_attn.calling.plain_modes import as_served
from paged_attn.tolerances import logits_limit, row_errors, typical

_last_alone: WeakSet[nn.Module] = WeakSet()  # models that give the logits of the last token alone


def logits_in(output: Any) -> Any:
    """The logits among what a model returns: itself, its `logits`, or the first of several; None where there are none."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) or hasattr(output, "logits"):
        return output.get("logits") if isinstance(output, Mapping) else output.logits
    return output[0] if isinstance(output, (tuple, list)) and output else None


def logits_of_all(model: nn.Module, ids: Tensor) -> Tensor:
    """The logits [1, T, width] of a model that gives those of the last token alone, and from now on how `rows_of_logits` comes by them.

    One that gives all where it is given targets (nanoGPT: it saves work otherwise) is given the tokens as targets, if the logits are those
    of each beginning of `ids`. Any other is called with each beginning, and its trace is to compute all (`tracing/last_token.py`).
    """

    def called(**targets: Tensor) -> Any:
        with model_code(UnsupportedError):
            return logits_in(model(**plain_inputs(model, ids), **targets))

    with as_served(model), left_as_it_was(model):
        _last_alone.add(model)
        alone = rows_of_logits(model, ids)
        for name in target_arguments(model):
            try:
                given = called(**{name: ids[None]})
            except UnsupportedError:
                continue
            if isinstance(given, Tensor) and given.shape == (1, *alone.shape):
                if typical(row_errors(given[0], alone)) <= logits_limit(given.dtype):
                    _last_alone.remove(model)
                    call_with_targets(model, name)
                    return given
    return alone[None]


def forget_how(model: nn.Module) -> None:
    """Forget how a model gives its logits: it may have changed since."""
    _last_alone.discard(model)


def gives_last_alone(model: nn.Module) -> bool:
    return model in _last_alone


def rows_of_logits(model: nn.Module, prompt: Tensor, positions: bool = False, **more: Any) -> Tensor:
    """Logits [T, vocabulary] of a prompt [T] by the model itself, called as users call it, or with position_ids 0, 1, ... and `more`."""

    def called(ids: Tensor) -> Tensor:
        logits: Tensor = logits_in(model(**plain_inputs(model, ids, positions), **more))
        return logits

    if not gives_last_alone(model):
        return called(prompt)[0]
    return torch.stack([called(prompt[:end]).flatten(0, -2)[-1] for end in range(1, len(prompt) + 1)])
