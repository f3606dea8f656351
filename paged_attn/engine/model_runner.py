"""The model of an engine: captured once as one graph with a symbolic number of tokens, then called with its parameters bound."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from paged_attn.attn_ops.batch import Batch
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv_pool import KVPool
from paged_attn.backends.base import AttentionBackend
from paged_attn.compiled_graph import CompiledGraph
from paged_attn.graph_inputs import GraphInputs
from paged_attn.options import CompileOptions
from paged_attn.self_check import logits_of

TRACE_TOKENS = 6


class ModelRunner:
    """Runs ragged batches through a model, which stays as it was.

    Args:
        model: takes input_ids and position_ids [1, T]; on one device.

    Raises:
        UnsupportedError: the model can not be captured as one graph, or has an attention that can not be proved.
    """

    def __init__(self, model: nn.Module, options: CompileOptions) -> None:
        self.model = model
        self.device = _only_device(model)
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.compiled, args = _capture(model, options, self.device)
        if self.compiled.split is None:
            raise UnsupportedError(f"{type(model).__name__} can not run paged batches: {self.compiled.rewrite.not_paged}")
        if acausal := [spec.module for spec in self.compiled.specs if not spec.causal]:
            raise UnsupportedError(
                f"{acausal[0]} attends in both directions, so that a later token would change earlier ones: this model can not generate token by token"
            )
        self.inputs = GraphInputs(self.compiled.roles, args)
        self.takes_logits_rows = self.inputs.takes_logits_rows

    def run(self, batch: Batch, pool: KVPool, backend: AttentionBackend) -> Tensor:
        """Logits [batch.num_logits, vocabulary] of the rows that want them."""
        args = self.inputs.fill(batch.input_ids, batch.positions, batch.logits_rows)
        with torch.no_grad(), ForwardContext(batch, pool, backend) as context:
            logits = logits_of(self.compiled.run_paged(context, args))
        return logits[: batch.num_logits] if self.takes_logits_rows else logits[batch.logits_rows[: batch.num_logits]]


def _call_model(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    output = model(**inputs)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits if hasattr(output, "logits") else output[0]
    return logits


def _capture(model: nn.Module, options: CompileOptions, device: torch.device) -> tuple[CompiledGraph, list[Any]]:
    """Trace with T and the number of logits rows symbolic; returns the graph and the inputs of the traced call."""
    captured: list[tuple[CompiledGraph, list[Any]]] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> CompiledGraph:
        compiled = CompiledGraph(gm, example_inputs, model, options)
        captured.append((compiled, list(example_inputs)))
        return compiled

    # Dynamo counts recompiles per code object; a copy keeps engines from using up each other's limit.
    target = types.FunctionType(_call_model.__code__.replace(), _call_model.__globals__)
    # What other models in this process looked like must not make this one's numbers symbolic.
    settings = torch._dynamo.config.patch(automatic_dynamic_shapes=False)
    with _evaluating(model), torch.no_grad(), settings:
        try:
            torch.compile(target, backend=backend, fullgraph=True)(model, _trace_inputs(model, device))
        except torch._dynamo.exc.BackendCompilerFailed as failure:
            if isinstance(failure.inner_exception, UnsupportedError):
                raise failure.inner_exception from None
            raise
        except torch._dynamo.exc.TorchDynamoException as failure:
            raise UnsupportedError(
                f"{type(model).__name__} can not be captured as one graph, which serving needs; torch.compile says:\n{failure}\n"
                "`paged_attn.patch(model)` runs models that can not be traced."
            ) from failure
    return captured[0]


def _trace_inputs(model: nn.Module, device: torch.device) -> dict[str, Any]:
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if "input_ids" not in parameters or not ("position_ids" in parameters or takes_any):
        raise UnsupportedError(
            f"{type(model).__name__}.forward takes ({', '.join(parameters)}); serving needs input_ids and position_ids, so that each request "
            "counts its own positions"
        )
    tokens = torch.arange(1, 1 + TRACE_TOKENS, device=device)[None]
    inputs: dict[str, Any] = {"input_ids": tokens, "position_ids": tokens - 1}
    for tensor in inputs.values():
        torch._dynamo.mark_dynamic(tensor, 1)
    if "logits_to_keep" in parameters:
        inputs["logits_to_keep"] = torch.tensor([0, 2, TRACE_TOKENS - 1], device=device)
        torch._dynamo.mark_dynamic(inputs["logits_to_keep"], 0)
    if "use_cache" in parameters or takes_any:
        inputs["use_cache"] = False
    return inputs


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, with every module's own flag restored."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def _only_device(model: nn.Module) -> torch.device:
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise UnsupportedError(
            f"the model lies on {sorted(map(str, devices)) or 'no device'}; an engine needs all of it on one device: model.to(device)"
        )
    return devices.pop()
