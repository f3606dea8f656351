"""After a failed self-check: which attention layer is the first to differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.history_op import HISTORY_ATTENTION
from paged_attn.attn_ops.kv_pool import KVPool
from paged_attn.backends.select import select_for_pool
from paged_attn.graph_inputs import GraphInputs
from paged_attn.passes.merge_linears import unmerged
from paged_attn.recurrent.run import runner_of

if TYPE_CHECKING:
    from paged_attn.compiled_graph import CompiledGraph


def first_layer_that_differs(compiled: CompiledGraph, inputs: GraphInputs, prompt: Tensor, limit: float) -> str:
    """Run one prompt through both graphs, compare each attention's output, and say in a sentence where they part."""
    assert compiled.eager_paged is not None
    if compiled.original is None:
        return "Which layer is the first to differ is not known: the graph is an earlier process's."
    if len(prompt) < (least := compiled.rewrite.form.min_tokens):
        return f"Which layer is the first to differ is not known: what was traced holds for {least} tokens and more."
    rows = torch.arange(len(prompt), device=prompt.device)
    before = {report.original_node: report.layer_id for report in compiled.rewrite.layers}
    after = {report.op_node: report.layer_id for report in compiled.rewrite.layers}
    with torch.no_grad():
        pool = KVPool(compiled.specs, len(prompt) + 1, 1, inputs.dtype, prompt.device)
        batch = Batch.build([BatchRequest(prompt.tolist(), list(range(1, len(prompt) + 1)), 0, len(prompt), 1)], 1, prompt.device)
        backend = select_for_pool("auto", pool).backend
        # Recurrent layers are ops in both graphs, and need their state in both.
        with ForwardContext(batch, pool, backend, runner_of(compiled.recurrent or (), 1, prompt.device)):
            expected = _Recorder(compiled.original, before).record(unmerged(inputs.fill(prompt, rows, rows), compiled.rewrite.merges))
        with ForwardContext(batch, pool, backend, runner_of(compiled.recurrent or (), 1, prompt.device)):
            got = _Recorder(compiled.eager_paged, after).record(inputs.fill(batch.input_ids, batch.positions, batch.logits_rows))
    for report in compiled.rewrite.layers:
        a = expected[report.layer_id]  # laid out as [lead.., T, dim] -> [T, heads, dim]
        a = a.permute(report.original_order).reshape(-1, *a.shape[-2:]) if a.dim() == len(report.original_order) else a[0]
        a = a.transpose(0, 1).float()
        error = float((a - got[report.layer_id].float()).abs().max() / a.abs().max().clamp_min(1e-6))
        if not error <= limit:
            return f"The first layer that differs is {report.layer_id} ({report.spec.module}: {report.spec.describe()}), by {error:.2g}."
    return "All attention layers agree when the prompt is run whole and alone, so the difference comes from chunks or other requests."


class _Recorder(fx.Interpreter):
    """Keeps the output of chosen nodes: of a paged op, the tensor that it wrote."""

    def __init__(self, gm: fx.GraphModule, wanted: dict[str, int]) -> None:
        super().__init__(gm)
        self.wanted, self.seen = wanted, dict[int, Tensor]()

    def record(self, args: list[Any]) -> dict[int, Tensor]:
        self.run(*args)
        return self.seen

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.name in self.wanted:
            written = result if isinstance(result, Tensor) else self.env_value(n.args[2 if n.target is HISTORY_ATTENTION else 3])
            self.seen[self.wanted[n.name]] = written.clone()
        return result

    def env_value(self, node: Any) -> Tensor:
        value: Tensor = self.env[node]
        return value
