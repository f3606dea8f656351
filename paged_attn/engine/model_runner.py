"""The model of an engine: captured once, proved against itself, then called with its parameters bound and no guards."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.batch import Batch
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv_pool import KVPool
from paged_attn.backends.base import AttentionBackend
from paged_attn.engine.capture_model import call_model, capture_model, evaluating, only_device
from paged_attn.graph_inputs import GraphInputs
from paged_attn.options import CompileOptions
from paged_attn.passes.model_facts import model_dtype
from paged_attn.self_check import logits_of


class ModelRunner:
    """Runs ragged batches through a model, which stays as it was.

    Args:
        model: takes input_ids and position_ids [1, T]; on one device.

    Raises:
        UnsupportedError: the model can not be captured as one graph, has an attention that can not be proved, or the self-check
            against the model itself fails.
    """

    def __init__(self, model: nn.Module, options: CompileOptions) -> None:
        self.model = model
        self.device = only_device(model)
        self.dtype = model_dtype(model)
        self.compiled, args = capture_model(model, options)
        if self.compiled.split is None:
            raise UnsupportedError(f"{type(model).__name__} can not run paged batches: {self.compiled.rewrite.not_paged}")
        if acausal := [spec.module for spec in self.compiled.specs if not spec.causal]:
            raise UnsupportedError(
                f"{acausal[0]} attends in both directions, so that a later token would change earlier ones: "
                "this model can not generate token by token"
            )
        self.inputs = GraphInputs(self.compiled.roles, args)
        self.takes_logits_rows = self.inputs.takes_logits_rows
        with evaluating(model):
            self.compiled.check(args, self._logits_alone)

    def _logits_alone(self, prompt: Tensor) -> Tensor:
        """Logits [T, vocabulary] of a prompt [T] by the unmodified model, called as its users call it."""
        inputs = {"input_ids": prompt[None]}
        positions = inspect.signature(self.model.forward).parameters.get("position_ids")
        if positions is not None and positions.default is inspect.Parameter.empty:
            inputs["position_ids"] = torch.arange(len(prompt), device=prompt.device)[None]
        return call_model(self.model, inputs)[0]

    def run(self, batch: Batch, pool: KVPool, backend: AttentionBackend) -> Tensor:
        """Logits [batch.num_logits, vocabulary] of the rows that want them."""
        args = self.inputs.fill(batch.input_ids, batch.positions, batch.logits_rows)
        with torch.no_grad(), ForwardContext(batch, pool, backend) as context:
            logits = logits_of(self.compiled.run_paged(context, args))
        return logits[: batch.num_logits] if self.takes_logits_rows else logits[batch.logits_rows[: batch.num_logits]]
