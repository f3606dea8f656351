"""What is disabled while Dynamo traces: the garbage collector, buffers of a class of their own, fused attention, messages and logs."""

from __future__ import annotations

import builtins
import gc
import logging
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from paged_attn.attn_ops.replaced_entries import replaced_entries

_LEVELS = ("debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log")


@contextmanager
def no_collections() -> Iterator[None]:
    """Nothing is collected inside; afterwards the collector is on again if it was on before.

    Dynamo makes objects by the million and drops few. Whenever their number has grown by a quarter, the collector looks through all of
    them, which takes a tenth of a trace's time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def plain_buffers(model: nn.Module) -> Iterator[None]:
    """Within the block, buffers made with `torch.nn.Buffer` are ordinary tensors of the same memory; afterwards they are themselves again.

    Dynamo (2.13) cannot trace a forward that assigns such a buffer to its own name (`self.table = self.table.to(x.device)`).
    """
    with ExitStack() as undo:
        for module in model.modules():
            buffers = module.named_buffers(recurse=False, remove_duplicate=False)
            plain = {name: buffer.detach() for name, buffer in buffers if getattr(buffer, "_is_buffer", False)}
            undo.enter_context(replaced_entries(module._buffers, plain))
        yield


@contextmanager
def open_multihead_attention() -> Iterator[None]:
    """Inside, `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` are traced as the linear layers and the attention that they are.

    Dynamo takes `F.multi_head_attention_forward` for one operation, by its identity, and looks into a copy; in eval mode the layer calls
    one fused operation of its own, unless that is switched off.
    """
    theirs, fused = F.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled()
    copy = types.FunctionType(theirs.__code__, theirs.__globals__, theirs.__name__, theirs.__defaults__, theirs.__closure__)
    copy.__kwdefaults__ = theirs.__kwdefaults__
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with replaced_entries(vars(F), {"multi_head_attention_forward": copy}):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@contextmanager
def plain_is_causal() -> Iterator[None]:
    """Inside, `F.scaled_dot_product_attention` accepts a truth value that Dynamo made of the number of tokens (`is_causal=T > 1`).

    It counts as what it is in the traced call, and the trace holds for calls where it is the same. The function itself accepts only a bool
    of Python's.
    """
    theirs = F.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if "is_causal" in kwargs:
            kwargs["is_causal"] = True if kwargs["is_causal"] else False
        elif len(args) > 2:
            args = (*args[:2], True if args[2] else False, *args[3:])
        return theirs(query, key, value, *args, **kwargs)

    with replaced_entries(vars(F), {"scaled_dot_product_attention": attention}):
        yield


def messages() -> set[Callable[..., Any]]:
    """What tells people something and returns nothing: torch.compile leaves such calls out of its graph."""
    logger = logging.Logger
    names = [name for name in dir(logger) if name.split("_")[0] in _LEVELS and callable(getattr(logger, name))]
    return {*(getattr(logger, name) for name in names), warnings.warn, builtins.print}


@contextmanager
def dynamo_unlogged() -> Iterator[None]:
    """Inside, Dynamo logs nothing of two kinds: a failed trace, whose error says it all, and metrics that it cannot write down.

    Trap: torch 2.11 sorts every set of its settings for those, and prints a traceback for one of functions, such as `messages`.
    """
    metrics, guards = (vars(logging.getLogger(name)) for name in ("torch._dynamo.metrics_context", "torch._guards"))
    with replaced_entries(metrics, {"disabled": True}), replaced_entries(guards, {"disabled": True}):
        yield
