"""Runs the traced graph on one prompt alone: its values at every boundary, and the effect of rounding on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import without_attention
from paged_attn.check.runs.boundaries import Boundaries, Boundary
from paged_attn.check.runs.choices import ChosenRun, PerturbedRun
from paged_attn.check.runs.served import AS_IT_IS, HowToRun, Original, must_run
from paged_attn.check.runs.steps import LONGEST
from paged_attn.check.runs.tapped import TappedRun, Taps, Visit, WideRun, unchanged
from paged_attn.check.runs.truth import Truth
from paged_attn.compiled.graph_inputs import GraphInputs, logits_of
from paged_attn.compiled.rewritten_graph import RewrittenGraph
from paged_attn.passes.find.attention_site import modules_of
from paged_attn.passes.fx.memory import written_names
from paged_attn.passes.fx.slicing import ancestors, evaluate
from paged_attn.passes.report import LayerReport
from paged_attn.recurrent.run import RecurrentRunner, TokenByToken, runner_of


class TracedOriginal(Original):
    """Runs the traced graph. `inputs`: bound to the model's tensors; `boundaries`: the values passed to `visit`."""

    def __init__(self, compiled: RewrittenGraph, inputs: GraphInputs, boundaries: Boundaries) -> None:
        self.gm, self.inputs = compiled.original, inputs
        self.taps = Taps(boundaries.names, boundaries.late, _inner_reads(self.gm.graph, boundaries))
        self.recurrent = compiled.recurrent or ()
        self._modules = compiled.rewrite.modules
        self.min_tokens = compiled.rewrite.form.min_tokens
        self.narrow = compiled.dtype(inputs)
        self.computed_as_it_is = set()

    def run(self, prompt: Tensor, visit: Visit, how: HowToRun = AS_IT_IS) -> Tensor:
        """A prompt shorter than the trace allows is padded with copies of its last token. Their logits are dropped, but `visit` gets their
        rows too."""
        count = len(prompt)
        padded = torch.cat([prompt, prompt[-1:].expand(self.padded_length(count) - count)])
        rows = torch.arange(len(padded), device=prompt.device)
        positions = rows if how.positions is None else how.positions
        positions = torch.cat([positions, positions[-1:].expand(len(padded) - len(positions))])
        args = self.inputs.fill(padded, positions, rows)
        run: TappedRun
        if how.wide:
            run = WideRun(self.gm, self.taps, visit, self.narrow)
        elif how.perturbed is not None:
            run = PerturbedRun(self.gm, self.taps, visit, self.narrow, how.perturbed)
        elif how.choices is not None:
            run = ChosenRun(self.gm, self.taps, visit, how.choices)
        else:
            run = TappedRun(self.gm, self.taps, visit)
        # Recurrent layers are ops of this graph too, and need a state to write.
        recurrent = runner_of(self.recurrent, 1, prompt.device, TokenByToken if how.token_by_token else RecurrentRunner)
        batch = Batch.build([BatchRequest(padded.tolist(), [1], 0, len(padded), 1)], len(padded), prompt.device)
        with without_attention(batch, self.narrow, recurrent), must_run("the traced graph", f"{len(padded)} tokens"):
            logits = logits_of(run.run(*args))[:count]
        if isinstance(run, WideRun):
            self.computed_as_it_is |= run.computed_as_it_is
        return logits

    def module_of(self, name: str) -> str:
        """The module and name of a node, for messages: `model.layers.1.mlp (add_3)`."""
        path = (self._modules or modules_of(self.gm.graph, (name,))).get(name, "")
        return f"{path} ({name})" if path else name

    def padded_length(self, count: int) -> int:
        return count if count >= self.min_tokens else self.min_tokens + count

    def attention(self, truth: Truth, layer: LayerReport, chosen: Tensor, _: dict[str, Tensor], wide: bool) -> Tensor | str:
        """[T, heads, v_dim]: a layer's own operations, mask included, on these rows [T] of the longest probe prompt as one sequence, in
        wider numbers or not; or why that cannot be computed."""
        name = layer.original_node
        if not layer.operands or not all(truth.has_rows(each.name) for each in layer.operands) or name not in truth.names:
            return "its operands are not rows of the graph"
        graph = self.gm.graph
        nodes = {node.name: node for node in graph.nodes}
        result, operands = nodes[name], [nodes[operand.name] for operand in layer.operands]
        rows = torch.arange(len(chosen), device=chosen.device)
        args = self.inputs.fill(torch.ones_like(rows), rows, rows)
        given: dict[fx.Node, Any] = dict(zip((node for node in graph.nodes if node.op == "placeholder"), args, strict=True))
        given |= {node: truth.laid_out(node.name, truth.rows(LONGEST, node.name)[chosen]) for node in operands}
        inside = [node for node in ancestors(result, result, frozenset(operands)) if node not in operands]
        if wide:
            return Boundary(name, layer).as_written(WideRun(self.gm, Taps(()), unchanged, self.narrow).evaluate(inside, given, result))
        return Boundary(name, layer).as_written(evaluate(inside, given, result))


def _inner_reads(graph: fx.Graph, boundaries: Boundaries) -> dict[str, frozenset[str]]:
    """By boundary, its readers in the same piece: nodes that lead to a boundary of that piece without passing another one. As in the served
    model, they read the value as it was computed; replaced values start at the next piece. A value that is written in place has none,
    since it would become two copies.

    The operands of an op between pieces come from an earlier piece even if they are not boundaries, such as the latents of an attention
    that is served by them.
    """
    stages, of_ops = boundaries.stages, {boundary.original for boundary in boundaries.written.values()}
    stage: dict[fx.Node, int] = {}
    last = max(stages.values(), default=0)
    for node in reversed(graph.nodes):
        stage[node] = stages.get(node.name, min((stage[user] - (user.name in of_ops) for user in node.users), default=last))
    written = written_names(graph)
    return {
        node.name: inner
        for node in graph.nodes
        if node.name in stages and node.name not in written
        and (inner := frozenset(user.name for user in node.users if stage[user] == stage[node]))
    }  # fmt: skip
