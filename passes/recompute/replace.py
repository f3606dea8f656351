"""Replaces an attention that no spec describes, whose mask is computed from hidden states or whose heads are mixed. The op in its place
evaluates the attention's own part of the graph on each request's tokens.

Before: out = F.sdpa(q, k, v, mask_from(x)) [1, Hq, T, Dv]
After:  rows = q, k, v and what the mask is made from, each [T, width]; o = aten.new_empty(rows[0], [T, Hq, Dv]);
        recompute_attention_with_output(rows, owned, o, layer_id); out = o^T[None]
The cost of a step is that of the attention on all tokens of every request, so this is the last resort.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import fx, nn
from torch.fx.node import Argument

from paged_attn.attn_ops.ops.recompute import RECOMPUTE_ATTENTION
from paged_attn.attn_ops.specs.recompute import RecomputeSpec, RowInput
from paged_attn.passes.find.attention_site import AttentionSite, WrittenScores
from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import value_of
from paged_attn.passes.fx.model_facts import max_positions, model_dtype
from paged_attn.passes.prove.other_mask import OtherMask
from paged_attn.passes.prove.score_subgraph import Recomputable
from paged_attn.passes.recompute.other_weights import reach_of_program
from paged_attn.passes.recompute.program import Program, make_program, owned_tensors, prove_causal, row_input
from paged_attn.passes.recompute.region import RecomputeRegion, TokenRows, find_recompute_region
from paged_attn.passes.replace.attention import use_output

logger = logging.getLogger("paged_attn")
aten = torch.ops.aten
ALIGNMENT = 8  # elements: later layers' K starts where kernels can load it


class RecomputeReplacer:
    """Replaces such attentions of one graph. Create it before any attention of the graph is replaced."""

    def __init__(self, graph: fx.Graph, form: CallForm, values: Values, model: nn.Module | None) -> None:
        self.form, self.values, self.model = form, values, model
        self.tokens = TokenRows(graph, form, values)
        self._proved: dict[str, tuple[Program, int | None]] = {}

    def replace(self, site: AttentionSite, layer_id: int, reason: Recomputable) -> tuple[RecomputeSpec, fx.Node, fx.Node]:
        """Replaces one site in place; returns the spec, the op's node, and the node that replaces the old output.

        Raises:
            UnsupportedError: it cannot be recomputed from what is kept for each token, or is not causal.
        """
        if isinstance(site.scores, WrittenScores) and site.scores.lse is not None:
            raise reason
        output, order = (site.scores.output, site.original_order) if isinstance(site.scores, WrittenScores) else (site.node, (0, 1, 2, 3))
        region = find_recompute_region(self.tokens, output, site.node, site.where)
        spec, program = self._spec(site, region, order, layer_id, f"{site.where}: {reason.what}")
        if spec.reach is None:
            logger.log(
                logging.WARNING if isinstance(reason, OtherMask) else logging.INFO,
                "%s: %s, so that every step evaluates it on all tokens of each request: the cost of a token grows with the square of the "
                "length", site.where, reason.what,
            )  # fmt: skip
        return (spec, *_emit(site, region, spec, program, layer_id))

    def _spec(
        self, site: AttentionSite, region: RecomputeRegion, order: Sequence[int], layer_id: int, where: str
    ) -> tuple[RecomputeSpec, Program]:
        result = value_of(site.node)
        dtype = result.dtype if self.model is None else model_dtype(self.model)
        rows = tuple(row_input(node, self.form, dtype) for node in region.rows)
        program = make_program(region, self.form, self.values, order, where)
        if program.computes not in self._proved:
            owned = owned_tensors(program, self.values)
            longest = max_positions(self.model)
            total = prove_causal(program, rows, owned, self.form, result.device, where, longest)
            reach = reach_of_program(program, rows, owned, total, self.form.min_tokens, result.device)
            if program.max_tokens is not None and (longest is None or program.max_tokens < longest):
                logger.warning(
                    "%s: requests end at %d tokens, as its code holds the number %d, and what it computes from so many tokens on is "
                    "not tried", where, program.max_tokens, program.max_tokens + 1,
                )  # fmt: skip
            self._proved[program.computes] = program, reach
        proved, reach = self._proved[program.computes]
        spec = RecomputeSpec(
            num_q_heads=int(result.shape[1]),
            num_kv_heads=1,
            qk_head_dim=-(-sum(row.elements for row in rows) // ALIGNMENT) * ALIGNMENT,
            v_head_dim=0,
            scale=1.0,
            kv_layer=layer_id,
            module=site.module,
            rows=rows,
            min_tokens=self.form.min_tokens,
            reach=reach,
            joined=reach is not None and not program.modules,  # a module's code may do something else with more tokens than were tried
            chooses=program.chooses,
            computes=program.computes,
            program=proved,
        )
        return spec, program


def _emit(site: AttentionSite, region: RecomputeRegion, spec: RecomputeSpec, program: Program, layer_id: int) -> tuple[fx.Node, fx.Node]:
    graph, value = site.node.graph, value_of(site.node)
    with graph.inserting_before(site.node):
        rows = [_rows(graph, node, row) for node, row in zip(region.rows, spec.rows, strict=True)]
        tokens = graph.call_function(aten.sym_size.int, (rows[0], 0))
        shape: list[Argument] = [tokens, spec.num_q_heads, int(value.shape[3])]
        output = graph.call_function(aten.new_empty.default, (rows[0], shape), {"dtype": value.dtype})
        arguments: tuple[Argument, ...] = (tuple(rows), program.owned, output, layer_id)
        op = graph.call_function(RECOMPUTE_ATTENTION, arguments)
    return op, use_output(site, output, [*rows, op], value.dtype)


def _rows(graph: fx.Graph, node: fx.Node, row: RowInput) -> fx.Node:
    """[T, width]"""
    dims = len(row.shape) + 1
    order = [row.token_dim, *(dim for dim in range(dims) if dim != row.token_dim)]
    if order != list(range(dims)):
        node = graph.call_function(aten.permute.default, (node, order))
    return graph.call_function(aten.reshape.default, (node, [-1, row.width]))
