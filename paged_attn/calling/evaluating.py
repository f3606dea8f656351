"""Calls a model as an engine does: in evaluation mode, and only for its logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from paged_attn.calling.hf_configs import logits_alone
from paged_attn.calling.plain_modes import plain_modes
from paged_attn.calling.reference_functions import reference_functions
from paged_attn.calling.uncompiled import without_compiled_calls


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
