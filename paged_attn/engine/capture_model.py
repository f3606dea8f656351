"""Capturing a model once as one graph with a symbolic number of tokens."""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.compiled_graph import CompiledGraph
from paged_attn.dynamo_backend import unwrapped_refusals
from paged_attn.hf_configs import attention_implementation
from paged_attn.options import CompileOptions

logger = logging.getLogger("paged_attn")
TRACE_TOKENS = 6
LONGEST_TRACE = 1 << 20


class _Captured(Exception):
    """Ends the traced call before it computes anything."""


def capture_model(model: nn.Module, options: CompileOptions) -> tuple[CompiledGraph, list[Any]]:
    """Trace with T and the number of logits rows symbolic; returns the graph and the flat inputs of the traced call.

    A model whose attention is set to another implementation (eager, which writes the softmax out) is traced with SDPA instead where
    transformers offers that, and set back; the self-check compares with the model as it was found.

    Raises:
        UnsupportedError: no single graph, an attention that can not be proved, or a forward without input_ids and position_ids.
    """
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", "sdpa")
    try:
        return _capture_all_lengths(model, options)
    except UnsupportedError as refusal:
        if implementation == "sdpa" or not hasattr(model, "set_attn_implementation"):
            raise
        try:
            with attention_implementation(model, "sdpa"):
                logger.info("tracing with attn_implementation='sdpa' instead of %r", implementation)
                return _capture_all_lengths(model, options)
        except (UnsupportedError, ValueError, ImportError):
            raise refusal from None


def _capture_all_lengths(model: nn.Module, options: CompileOptions) -> tuple[CompiledGraph, list[Any]]:
    """A trace that holds for short calls only (a model that builds no mask below its window) is made again beyond that length."""
    length = TRACE_TOKENS
    while True:
        compiled, args = _capture(model, options, length)
        bound = compiled.rewrite.form.max_tokens
        if compiled.split is not None or bound is None or bound >= LONGEST_TRACE:
            return compiled, args
        length = bound + 2


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


def call_model(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The logits of a call, whatever the model wraps them in."""
    output = model(**inputs)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits if hasattr(output, "logits") else output[0]
    return logits


def only_device(model: nn.Module) -> torch.device:
    """The one device of a model's tensors; UnsupportedError if there are several, or none that holds data."""
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise UnsupportedError(
            f"the model lies on {sorted(map(str, devices)) or 'no device'}; an engine needs all of it on one device: model.to(device)"
        )
    return devices.pop()


def _capture(model: nn.Module, options: CompileOptions, length: int) -> tuple[CompiledGraph, list[Any]]:
    captured: list[tuple[CompiledGraph, list[Any]]] = []

    def stop(*_: Any) -> NoReturn:
        raise _Captured

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        captured.append((CompiledGraph(gm, example_inputs, model, options), list(example_inputs)))
        return stop

    # Dynamo counts recompiles per code object; a copy keeps engines from using up each other's limit.
    target = types.FunctionType(call_model.__code__.replace(), call_model.__globals__)
    # What other models in this process looked like must not make this one's numbers symbolic.
    settings = torch._dynamo.config.patch(automatic_dynamic_shapes=False)
    try:
        with evaluating(model), settings, unwrapped_refusals():
            torch.compile(target, backend=backend, fullgraph=True)(model, _trace_inputs(model, length))
    except _Captured:
        return captured[0]
    except torch._dynamo.exc.BackendCompilerFailed:
        raise
    except (torch._dynamo.exc.TorchDynamoException, ConstraintViolationError) as failure:
        raise UnsupportedError(
            f"{type(model).__name__} can not be captured as one graph, which serving needs; torch.compile says:\n{failure}\n"
            "`paged_attn.patch(model)` runs models that can not be traced."
        ) from failure
    raise UnsupportedError(f"{type(model).__name__}.forward computes nothing that torch.compile can capture")


def _trace_inputs(model: nn.Module, length: int) -> dict[str, Any]:
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if "input_ids" not in parameters or not ("position_ids" in parameters or takes_any):
        raise UnsupportedError(
            f"{type(model).__name__}.forward takes ({', '.join(parameters)}); serving needs input_ids and position_ids, "
            "so that each request counts its own positions"
        )
    device = only_device(model)
    positions = torch.arange(length, device=device)[None]
    inputs: dict[str, Any] = {"input_ids": positions % TRACE_TOKENS, "position_ids": positions}
    for tensor in inputs.values():
        torch._dynamo.mark_dynamic(tensor, 1)
    if "logits_to_keep" in parameters:
        inputs["logits_to_keep"] = torch.tensor([0, 2, length - 1], device=device)
        torch._dynamo.mark_dynamic(inputs["logits_to_keep"], 0)
    if "use_cache" in parameters or takes_any:
        inputs["use_cache"] = False
    return inputs
