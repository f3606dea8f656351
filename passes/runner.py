"""The one place that knows the order of the passes; it lints, removes dead code, times and counts."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.ops.recurrent import RECURRENT_LAYER
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.passes.find.attention import find_attention
from paged_attn.passes.find.attention_site import AttentionSite, WrittenScores
from paged_attn.passes.fx.call_form import CallForm, CallNotPaged, find_call_form
from paged_attn.passes.fx.constants import specialise_numbers
from paged_attn.passes.fx.graph_tools import copy_graph_module, remove_dead_code, same_values, shape_of, value_of, written_names
from paged_attn.passes.fx.model_facts import model_dtype
from paged_attn.passes.fx.read_values import ReadValues
from paged_attn.passes.optimize.linears.gemv import use_one_row_linears
from paged_attn.passes.optimize.linears.merge import Merge, merge_linears
from paged_attn.passes.optimize.logits_gather.gather import select_rows_early
from paged_attn.passes.positions.own_positions import use_own_positions
from paged_attn.passes.prove.attention import AttentionProof, Prover, refuse_implausible
from paged_attn.passes.prove.score_subgraph import Recomputable
from paged_attn.passes.recompute.replace import HistoryReplacer
from paged_attn.passes.replace.attention import replace_attention
from paged_attn.passes.replace.equal_heads import has_equal_heads
from paged_attn.passes.replace.kv_heads import KVSource, as_received, is_written, kv_source
from paged_attn.passes.replace.operand_layout import Operand, operand_of

logger = logging.getLogger("paged_attn")
RECOMPUTED = "recomputed from each request's history; no later token changes an earlier row"
NOT_COMPARED = "not compared with the config: the graph's own mask is evaluated"


@dataclass(frozen=True)
class LayerReport:
    """One line of `explain`: the spec, how the attention was found and proved, and the nodes before and after.

    operands: where query, key and value come from in the traced graph; none where they are no mere change of layout of its values.
    """

    layer_id: int
    spec: AttentionSpec
    found_by: str
    proof: str
    declared: str
    original_node: str
    original_order: tuple[int, ...]
    op_node: str
    operands: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class OptionalPasses:
    """What makes a paged graph faster, each alone or all together.

    Attributes:
        merge_linears: make one linear of several with one input; whoever runs the graph must merge their weights, see `Rewrite.merges`.
        early_rows: pick the rows whose logits are wanted as early as is proved.
        one_row_linears: linears through an op that has a kernel for a single row.
    """

    merge_linears: bool = False
    early_rows: bool = False
    one_row_linears: bool = False


NO_PASSES = OptionalPasses()


@dataclass
class Rewrite:
    """The rewritten graph of a paged call, or the reason why this call is not one (`gm` is None)."""

    form: CallForm
    gm: fx.GraphModule | None = None
    layers: list[LayerReport] = field(default_factory=list)
    not_paged: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    nodes_before: int = 0
    nodes_after: int = 0
    positions_redirected: int = 0
    merges: tuple[Merge, ...] = ()
    early_rows: int = 0  # nodes that compute the wanted rows only
    one_row_linears: int = 0
    max_positions: int | None = None  # as far as the graph shows; a longer sequence can not run
    evaluated: tuple[int, ...] = ()  # the inputs on whose values the proofs rest
    traced: dict[str, str] = field(default_factory=dict)  # nodes that stand for the same value in the traced graph, by their names in both
    places: dict[str, str] = field(default_factory=dict)  # of a graph from disk: the modules of nodes of the traced graph

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        return tuple(report.spec for report in self.layers)


def rewrite(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    model: nn.Module | None,
    limited: bool = False,
    optional: OptionalPasses = NO_PASSES,
) -> Rewrite:
    """Rewrite a copy of a Dynamo graph; `gm` itself stays as it is.

    Args:
        limited: see `find_call_form`.
        optional: what else shall be done.

    Raises:
        UnsupportedError: the model has an attention that can not be proved or replaced; the message names it.
    """
    form = find_call_form(gm.graph, limited)
    result = Rewrite(form, not_paged=form.reason, nodes_before=len(gm.graph.nodes))
    try:
        _rewrite_into(result, gm, example_inputs, model, optional)
    except CallNotPaged as reason:
        result.not_paged = result.not_paged or str(reason)
        result.layers.clear()
    return result


def _rewrite_into(
    result: Rewrite,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    model: nn.Module | None,
    optional: OptionalPasses,
) -> None:
    clock = _Clock(result.seconds)
    copied = copy_graph_module(gm)
    # Placeholders carry Dynamo's sources, which a copied graph loses: read the form again with the originals' help.
    form = _form_of_copy(result.form, gm.graph, copied.graph)
    specialise_numbers(gm.graph, copied.graph)
    placeholders = [n for n in copied.graph.nodes if n.op == "placeholder"]
    values = ReadValues(dict(zip(placeholders, example_inputs, strict=True)))
    sites = find_attention(copied.graph, form)
    clock.lap("find attention")
    if form.reason:
        refuse_implausible(sites, form, values)
        return
    if not sites and not any(node.target is RECURRENT_LAYER for node in copied.graph.nodes):
        none = "the model has no attention that paged_attn can see; there is nothing to page"
        raise UnsupportedError(none) if form.positions is not None else CallNotPaged(none)  # a part of a broken graph has no positions
    prover = Prover(form, values, model)
    proofs = [_prove(prover, site) for site in sites]
    clock.lap("prove masks")
    history = HistoryReplacer(copied.graph, form, values, model) if any(isinstance(p, Recomputable) for p in proofs) else None
    _replace(result, sites, proofs, form, values, model, history)
    clock.lap("replace attention")
    remove_dead_code(copied.graph)
    result.positions_redirected, result.max_positions = use_own_positions(copied.graph, form, values)
    limits = [result.max_positions, *(proof.max_tokens for proof in proofs if isinstance(proof, AttentionProof))]
    result.max_positions = min((limit for limit in limits if limit is not None), default=None)
    remove_dead_code(copied.graph)
    result.evaluated = tuple(index for index, node in enumerate(placeholders) if node in values.read)
    clock.lap("positions and dead code")
    if optional.early_rows:
        result.early_rows = select_rows_early(copied.graph, form, values)
        clock.lap("pick rows early")
    if optional.merge_linears:
        result.merges = merge_linears(copied.graph, form, values, model)
        clock.lap("merge linears")
    if optional.one_row_linears:
        result.one_row_linears = use_one_row_linears(copied.graph, form)
    copied.graph.lint()
    copied.recompile()
    result.gm, result.nodes_after = copied, len(copied.graph.nodes)
    result.traced = same_values(gm.graph, copied.graph)
    written = written_names(gm.graph)
    result.layers = [
        replace(report, operands=tuple(replace(each, late=each.name in written) for each in report.operands)) for report in result.layers
    ]
    logger.info("rewrote %d attention layers in %.2f s", len(sites), sum(result.seconds.values()))


def _prove(prover: Prover, site: AttentionSite) -> AttentionProof | Recomputable:
    """Its proof, or why it has none and must be evaluated anew on all tokens of each request."""
    try:
        return prover.prove(site)
    except Recomputable as reason:
        return reason


def _replace(
    result: Rewrite,
    sites: list[AttentionSite],
    proofs: list[AttentionProof | Recomputable],
    form: CallForm,
    values: dict[fx.Node, Any],
    model: nn.Module | None,
    history: HistoryReplacer | None,
) -> None:
    owners: dict[tuple[KVSource, KVSource], tuple[int, fx.Node]] = {}
    replaced: dict[fx.Node, fx.Node] = {}  # attention may read another attention's output directly
    for layer_id, (found, proof) in enumerate(zip(sites, proofs, strict=True)):
        if isinstance(proof, Recomputable):
            assert history is not None
            recomputed, op, replaced[found.node] = history.replace(found, layer_id, proof)
            words = (found.found_by, f"{proof.what}: {RECOMPUTED}", NOT_COMPARED)
            result.layers.append(LayerReport(layer_id, recomputed, *words, found.original, found.original_order, op.name))
            continue
        operands = {name: replaced.get(node, node) for name, node in (("query", found.query), ("key", found.key), ("value", found.value))}
        site = replace(found, **operands)  # type: ignore[arg-type]
        key, value = _keys_and_values(site, form, values)
        owner = owners.get((key, value))
        if owner is not None and is_written({key.base, value.base}, owner[1], site.node):
            owner = None  # they have changed since
        spec = AttentionSpec(
            num_q_heads=int(shape_of(site.query)[1]),
            num_kv_heads=key.num_heads,
            qk_head_dim=int(shape_of(site.query)[3]),
            v_head_dim=int(shape_of(site.value)[3]),
            scale=proof.function.scale,
            causal=proof.family.causal,
            sliding_window=proof.family.window,
            chunk=proof.family.chunk,
            softcap=proof.function.softcap,
            has_sinks=proof.function.has_sinks,
            alibi_slopes=proof.bias.slopes if proof.bias else None,
            bias_index=proof.bias.index if proof.bias else None,
            gives_lse=isinstance(site.scores, WrittenScores) and site.scores.lse is not None,
            kv_layer=layer_id if owner is None else owner[0],
            module=site.module,
        )
        dtype = value_of(site.value).dtype if model is None else model_dtype(model)
        traced = [operand_of(source, form) for source in (as_received(site.query, spec.num_q_heads), key, value)]
        come_from = tuple(each for each in traced if each is not None) if None not in traced else ()
        op, replaced[site.node] = replace_attention(site, spec, layer_id, key, value, proof, dtype)
        owners[key, value] = owner or (layer_id, op)
        words = (site.found_by, proof.evidence, proof.declared)
        result.layers.append(LayerReport(layer_id, spec, *words, site.original, site.original_order, op.name, come_from))


def _keys_and_values(site: AttentionSite, form: CallForm, values: dict[fx.Node, Any]) -> tuple[KVSource, KVSource]:
    """Both before repetition, with the same number of heads."""
    key, value = kv_source(site.key, site.node, form), kv_source(site.value, site.node, form)
    fewest = min(key.num_heads, value.num_heads)
    sources = []
    for source, operand in ((key, site.key), (value, site.value)):
        if source.num_heads != fewest and has_equal_heads(operand, site.node, fewest, form, values):
            source = as_received(operand, fewest)
        sources.append(source)
    if sources[0].num_heads != sources[1].num_heads:
        sources = [as_received(n, int(shape_of(n)[1])) for n in (site.key, site.value)]
    if sources[0].num_heads != sources[1].num_heads:
        raise UnsupportedError(
            f"{site.where}: {sources[0].num_heads} heads of keys but {sources[1].num_heads} of values; known is one number"
        )
    return sources[0], sources[1]


def _form_of_copy(form: CallForm, original: fx.Graph, copied: fx.Graph) -> CallForm:
    pairs = zip(
        (n for n in original.nodes if n.op == "placeholder"),
        (n for n in copied.nodes if n.op == "placeholder"),
        strict=True,
    )
    return replace(form, roles={new: form.roles[old] for old, new in pairs})


class _Clock:
    def __init__(self, laps: dict[str, float]) -> None:
        self.laps, self.last = laps, time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self.last
        self.last = now
