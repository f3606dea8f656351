"""All passes in their order. `paged-attn passes` prints this list; `disable_passes` leaves optional ones out, `PAGED_ATTN_DUMP` writes the
graph before and after each."""

from __future__ import annotations

from collections import Counter

from torch import fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.ops.kinds import WITH_STATE
from paged_attn.attn_ops.ops.recurrent import RECURRENT_LAYER
from paged_attn.attn_ops.specs.recompute import RecomputeSpec
from paged_attn.passes.find.attention import find_attention
from paged_attn.passes.fx.call_form import CallNotPaged
from paged_attn.passes.fx.constants import specialise_numbers
from paged_attn.passes.fx.graph_tools import name_of, shape_of
from paged_attn.passes.fx.memory import remove_dead_code
from paged_attn.passes.fx.model_facts import least, max_positions
from paged_attn.passes.optimize.complex_as_real import complex_as_real
from paged_attn.passes.optimize.dense_experts import replace_dense_experts
from paged_attn.passes.optimize.gated_delta_net import fuse_gated_delta_nets
from paged_attn.passes.optimize.late_views import make_views_late
from paged_attn.passes.optimize.linears.add_norm import fuse_add_norm
from paged_attn.passes.optimize.linears.float32_products import use_linear_float32
from paged_attn.passes.optimize.linears.gemv import use_gemv
from paged_attn.passes.optimize.linears.merge import merge_linears
from paged_attn.passes.optimize.linears.merge_rotations import merge_rotations
from paged_attn.passes.optimize.logits_gather import gather_logits_early
from paged_attn.passes.optimize.routing import fuse_routing
from paged_attn.passes.optimize.scan_operands import read_columns_in_place, read_unrepeated_heads
from paged_attn.passes.optimize.stacked_experts import keep_stacked
from paged_attn.passes.positions.independent_rows import MixesRows, check_independent_rows
from paged_attn.passes.positions.own_positions import use_own_positions
from paged_attn.passes.prove.attention import AttentionProof, Prover, refuse_implausible
from paged_attn.passes.prove.dual_chunk import DualChunkProof
from paged_attn.passes.prove.latent import LatentProof, LatentProver
from paged_attn.passes.prove.score_subgraph import Recomputable
from paged_attn.passes.recompute.nearby import find_nearby_rows
from paged_attn.passes.recompute.program import Program
from paged_attn.passes.replace_layers import pool_dtype, replace_layers
from paged_attn.passes.report import Facts, GraphPass

_MULTIHEAD_ATTENTION = {"multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"}


def _find(graph: fx.Graph, facts: Facts) -> str:
    nearby = [] if facts.form.reason else find_nearby_rows(graph, facts.form, facts.values, facts.model)
    facts.sites = sorted([*nearby, *find_attention(graph, facts.form)], key=lambda site: site.node)
    if facts.form.reason:
        refuse_implausible(facts.sites, facts.form, facts.values)
        raise CallNotPaged(facts.form.reason)
    if not facts.sites and not any(node.target in WITH_STATE for node in graph.nodes):
        none = (
            "the model has no attention that paged_attn can see: there is no KV to page, and nothing shows what a row of its logits takes "
            "from other tokens of a batch"
        )
        if any(name_of(node) in _MULTIHEAD_ATTENTION for node in graph.nodes):
            none = (
                "its attention is nn.MultiheadAttention, which a bare torch.compile takes for one operation. LLM(model) opens it and "
                "serves the model; or write F.scaled_dot_product_attention in its place"
            )
        else:
            _independent_rows(graph, facts)  # raises first if it can name what mixes tokens
        # One piece of a model that torch.compile broke into several graphs has no positions.
        raise UnsupportedError(none) if facts.form.positions is not None else CallNotPaged(none)
    return f"{len(facts.sites)} attentions"


def _prove(graph: fx.Graph, facts: Facts) -> str:
    prover = Prover(facts.form, facts.values, facts.model)
    read = set(facts.values.read)
    for site in facts.sites:
        facts.values.read.clear()
        try:
            proof: AttentionProof | DualChunkProof | Recomputable = prover.prove(site)
        except Recomputable as reason:
            proof = reason
        facts.proofs.append(proof)
        if not isinstance(proof, Recomputable):  # a recomputed attention reads its tensors in every step; the op reads sinks in place
            facts.baked |= facts.values.read - ({proof.function.sinks} if isinstance(proof, AttentionProof) else set())
        read |= facts.values.read
    facts.values.read |= read
    recomputed = sum(isinstance(proof, Recomputable) for proof in facts.proofs)
    return f"{len(facts.proofs) - recomputed} proved" + (f", {recomputed} recomputed from all tokens" if recomputed else "")


def _latents(graph: fx.Graph, facts: Facts) -> int:
    prover = LatentProver(graph, facts.form)
    for index, (site, proof) in enumerate(zip(facts.sites, facts.proofs, strict=True)):
        if isinstance(proof, AttentionProof) and (latent := prover.prove(site, proof, pool_dtype(site, facts.model))):
            facts.latents[index] = latent
    return sum(isinstance(each, LatentProof) for each in facts.latents.values())


def _positions(graph: fx.Graph, facts: Facts) -> str:
    result = facts.result
    result.positions_redirected, longest = use_own_positions(graph, facts.form, facts.values, max_positions(facts.model))
    limits = [longest, *(proof.max_tokens for proof in facts.proofs if isinstance(proof, AttentionProof))]
    limits += [spec.program.max_tokens for spec in result.specs if isinstance(spec, RecomputeSpec) and isinstance(spec.program, Program)]
    result.max_positions = least(*limits)
    remove_dead_code(graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    result.baked = tuple(index for index, node in enumerate(placeholders) if node in facts.baked and facts.form.roles[node] == "owned")
    result.evaluated = tuple(index for index, node in enumerate(placeholders) if node in facts.values.read)
    return f"{result.positions_redirected} values"


def _independent_rows(graph: fx.Graph, facts: Facts) -> str:
    longest = least(facts.result.max_positions, max_positions(facts.model))
    try:
        return check_independent_rows(graph, facts.form, facts.values, longest)
    except MixesRows as refusal:
        facts.result.mixes = refusal
        if refusal.by_position:
            return "a far position moves other tokens; without an engine, the self-check says what to set"
        raise CallNotPaged(str(refusal)) from refusal


def _merge(graph: fx.Graph, facts: Facts) -> str:
    merges = merge_linears(graph, facts.form, facts.values, facts.model)
    facts.result.merges += merges
    return f"{sum(len(merge.inputs) for merge in merges)} weights into {len(merges)}"


def _experts(graph: fx.Graph, facts: Facts) -> str:
    if facts.choose_experts is not None:
        replace_dense_experts(graph, facts.values, facts.choose_experts)
    facts.result.merges += keep_stacked(graph, facts.values)
    layers = graph.find_nodes(op="call_function", target=EXPERTS)
    facts.result.experts = dict(Counter(str(node.args[-1]) for node in layers))
    sizes = [(shape_of(node.args[3])[0], shape_of(node.args[1])[1]) for node in layers]  # weights [experts, ..], ids [T, chosen]
    facts.result.experts_per_choice = max((int(experts) // int(chosen) for experts, chosen in sizes), default=0)
    return f"{sum(facts.result.experts.values())} layers"


def _scans(graph: fx.Graph, facts: Facts) -> int:
    in_place = read_columns_in_place(graph, facts.form), read_unrepeated_heads(graph, facts.form)
    if any(in_place):
        remove_dead_code(graph)
    return sum(node.target in WITH_STATE and node.target is not RECURRENT_LAYER for node in graph.nodes)


PASSES = (
    GraphPass(
        "specialise_numbers", "numbers of the model that Dynamo made symbolic become constants again",
        lambda graph, facts: specialise_numbers(facts.original, graph), "{} nodes",
    ),
    GraphPass("find_attention", "every attention, in whatever way it is written", _find),
    GraphPass("prove_attention", "what each computes (mask, bias, scale, softcap, sinks), evaluated and compared", _prove),
    GraphPass(
        "latent_attention", "keys and values that are maps of one narrow row per token: only the row is kept",
        _latents, "{} layers keep one row per token in place of keys and values",
    ),
    GraphPass("replace_attention", "each becomes an op on pages", replace_layers),
    GraphPass("own_positions", "positions that the model counts itself become those of the batch", _positions),
    GraphPass("independent_rows", "what is between the ops gives each token a row of its own: seen on two runs", _independent_rows),
    GraphPass("experts", "layers of experts that are proved become one op each, most while the model is traced", _experts),
    GraphPass(
        "scans", "what recurrent layers do with their states becomes ops on slots, which read their operands where they lie",
        _scans, "{} scans and short convolutions are ops on slots of state",
    ),
    GraphPass(
        "gated_delta_net", "the gates and the gated norm of a delta rule within its op",
        lambda graph, facts: fuse_gated_delta_nets(graph, facts.form), "{} delta rules are one op with their gates and norm",
    ),
    GraphPass(
        "complex_as_real", "products of complex numbers, as some rotations are, in real arithmetic",
        lambda graph, facts: complex_as_real(graph), "{} operations on complex numbers are done in real ones",
    ),
    GraphPass(
        "early_logits_gather", "after the last attention only the rows whose logits are wanted are computed",
        lambda graph, facts: gather_logits_early(graph, facts.form, facts.values), "{} operations at the end compute the wanted rows only",
    ),
    GraphPass(
        "routing", "what stands between a router's logits and its experts becomes one op",
        lambda graph, facts: fuse_routing(graph, facts.values), "{} routers are one op each",
    ),
    GraphPass("merge_linears", "one matrix product for q, k and v, one for gate and up", _merge),
    GraphPass(
        "merge_rotations", "one kernel for the rotations of q and k, and for whatever else two parts of a product go through alike",
        lambda graph, facts: merge_rotations(graph), "{} pairs of parts go through the same operations as one",
    ),
    GraphPass(
        "late_views", "parts of a product are taken where they are first used, so that no piece copies them for another",
        lambda graph, facts: make_views_late(graph), "{} views and copies are made later",
    ),
    GraphPass(
        "linear_float32", "products in float32 of tensors in 16 bits, as routers have, without casts",
        lambda graph, facts: use_linear_float32(graph, facts.form, facts.values),
        "{} products in float32 take tensors in 16 bits as they are",
    ),
    GraphPass(
        "gemv", "linears through an op that has a kernel for a single row",
        lambda graph, facts: use_gemv(graph, facts.form), "{} linears have a kernel for single rows",
    ),
    GraphPass(
        "add_norm", "a residual addition and an RMS norm within the product behind them, for a single row",
        lambda graph, facts: fuse_add_norm(graph, facts.form), "{} norms are part of a product",
    ),
)  # fmt: skip
