"""The modes of the thread that calls us: gradients, inference mode, autocast and a default device, none of which may reach what an engine
keeps or computes; and of a model, which an engine calls in evaluation mode, and only for its logits.

A tensor made in inference mode cannot be written outside of it. Under autocast a model computes in other dtypes than it was proved in,
and keeps K and V in others than the pool has; graphs that were captured without it would not follow. What we make without a device lies
on the host, and so does what a model makes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from paged_attn.calling.hf_configs import logits_alone
from paged_attn.calling.reference_functions import reference_functions
from paged_attn.calling.uncompiled import without_compiled_calls

logger = logging.getLogger("paged_attn")
_DEVICES = ("cpu", "cuda")
_P = ParamSpec("_P")
_R = TypeVar("_R")


def autocasts() -> bool:
    """Whether a model would compute in other dtypes than its own."""
    return any(map(torch.is_autocast_enabled, _DEVICES))


def _has_default_device() -> bool:
    """Whether tensors that say no device lie elsewhere than on the host; to ask for the device alone takes 6 us."""
    return torch._C._len_torch_function_stack() > 0 and torch.get_default_device().type != "cpu"


@contextmanager
def plain_modes() -> Iterator[None]:
    """Inside, there is no inference mode, no autocast and no default device, and no gradients are recorded; afterwards all is as before."""
    with ExitStack() as modes:
        if _has_default_device():
            modes.enter_context(torch.device("cpu"))
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                _say_once(device, torch.get_autocast_dtype(device))
                modes.enter_context(torch.autocast(device, enabled=False))
        modes.enter_context(torch.no_grad())
        yield


def in_plain_modes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, in `plain_modes` whatever its caller is in; 0.4 us where that is nothing."""

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not (torch.is_inference_mode_enabled() or autocasts() or _has_default_device()):
            return function(*args, **kwargs)
        with plain_modes():
            return function(*args, **kwargs)

    return called


@functools.cache
def _say_once(device: str, dtype: torch.dtype) -> None:
    logger.warning(
        "an engine is used under torch.autocast(%r, %s), which it does not follow: it computes in the model's own dtypes, in which it was "
        "compared with the model; for another one convert the model before you give it to LLM",
        device, dtype,
    )  # fmt: skip


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, with every module's own flag restored."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in flags:
            module.training = training


@contextmanager
def as_served(model: nn.Module) -> Iterator[None]:
    """The same, in plain modes, as written where `module.compile()` was called, by transformers' own functions, and without the outputs
    besides logits that a config may ask for: for tracing and comparing."""
    with plain_modes(), without_compiled_calls(model), reference_functions(model), logits_alone(model), evaluating(model):
        yield
