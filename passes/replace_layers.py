"""Replaces proved attentions by ops, layer by layer."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.recompute import RecomputeSpec
from paged_attn.passes.find.attention_site import AttentionSite, DualChunkScores, WrittenScores
from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import shape_of, value_of
from paged_attn.passes.fx.memory import remove_dead_code
from paged_attn.passes.fx.model_facts import model_dtype
from paged_attn.passes.prove.attention import AttentionProof
from paged_attn.passes.prove.dual_chunk import DualChunkProof
from paged_attn.passes.prove.latent import LatentProof
from paged_attn.passes.prove.score_subgraph import Recomputable
from paged_attn.passes.recompute.replace import RecomputeReplacer
from paged_attn.passes.replace.attention import replace_attention, with_scaled_query
from paged_attn.passes.replace.dual_chunk import replace_dual_chunk
from paged_attn.passes.replace.kv_heads import KVSource, as_received, has_equal_heads, kv_source
from paged_attn.passes.replace.latent import replace_latent
from paged_attn.passes.replace.operand_layout import Operand, operand_of
from paged_attn.passes.replace.same_kv import Kept, ReadFrom
from paged_attn.passes.report import Facts, LayerReport

RECOMPUTED = "recomputed from each request's history; no later token changes an earlier row"
NOT_COMPARED = "not compared with the config: the graph's own mask is evaluated"


def replace_layers(graph: fx.Graph, facts: Facts) -> str:
    """Replaces every attention by an op; layers that read the same keys and values share one KV layer."""
    form, values, model, result = facts.form, facts.values, facts.model, facts.result
    recompute = RecomputeReplacer(graph, form, values, model) if any(isinstance(p, Recomputable) for p in facts.proofs) else None
    owners: dict[tuple[ReadFrom, ReadFrom], Kept] = {}
    replaced: dict[fx.Node, fx.Node] = {}  # attention may read another attention's output directly
    for layer_id, (found, proof) in enumerate(zip(facts.sites, facts.proofs, strict=True)):
        latent, dtype = facts.latents.get(layer_id, ""), pool_dtype(found, model)
        operands: tuple[Operand, ...] = ()
        spec: AttentionSpec
        query, key_node, value_node = (replaced.get(node, node) for node in (found.query, found.key, found.value))
        site = replace(found, query=query, key=key_node, value=value_node)
        if isinstance(proof, Recomputable):
            assert recompute is not None
            spec, op, replaced[found.node] = recompute.replace(found, layer_id, proof)
            assert isinstance(spec, RecomputeSpec)
            few = "" if spec.reach is None else f" with no more than {spec.reach} before a token"
            evidence, declared = f"{proof.what}{few}: {RECOMPUTED}", NOT_COMPARED
        elif isinstance(latent, LatentProof):
            assert isinstance(proof, AttentionProof)
            spec, op, replaced[found.node] = replace_latent(site, latent, proof, layer_id, dtype)
            evidence, declared = f"{proof.evidence}; {latent.evidence}", proof.declared
        elif isinstance(proof, DualChunkProof):
            assert isinstance(found.scores, DualChunkScores)
            queries = [replaced.get(each, each) for each in found.scores.queries]
            key, value = _keys_and_values(site, form, values)
            spec, op, replaced[found.node] = replace_dual_chunk(site, queries, key, value, proof, layer_id, dtype)
            evidence, declared = proof.evidence, proof.declared
        else:
            if proof.function.by_head is not None:
                site = with_scaled_query(site, proof.function.by_head, layer_id, proof.device)
            key, value = _keys_and_values(site, form, values)
            (same_key, from_key), (same_value, from_value) = ReadFrom.of(key), ReadFrom.of(value)
            owner = owners.get((same_key, same_value))
            if owner is not None and not owner.still_holds((*from_key, *from_value), site.node):
                owner = None  # the keys or values have changed since
            spec = _spec_of(site, key, proof, layer_id if owner is None else owner.layer_id)
            traced = [operand_of(source, form) for source in (as_received(site.query, spec.num_q_heads), key, value)]
            operands = tuple(each for each in traced if each is not None) if None not in traced else ()
            op, replaced[found.node] = replace_attention(site, spec, layer_id, key, value, proof, dtype)
            owners[same_key, same_value] = owner or Kept(layer_id, op, from_key, from_value)
            evidence = proof.evidence + (f"; keys and values stay expanded: {latent}" if latent else "")
            declared = proof.declared
        report = LayerReport(layer_id, spec, found.found_by, evidence, declared, found.original, found.original_order, op.name, operands)
        result.layers.append(report)
    remove_dead_code(graph)
    return f"{len(result.layers)} layers"


def _spec_of(site: AttentionSite, key: KVSource, proof: AttentionProof, kv_layer: int) -> AttentionSpec:
    return AttentionSpec(
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
        kv_layer=kv_layer,
        module=site.module,
        window_ahead=proof.family.ahead,
    )


def pool_dtype(site: AttentionSite, model: nn.Module | None) -> torch.dtype:
    """The dtype of the pool that will hold a layer's keys and values."""
    dtype: torch.dtype = value_of(site.value).dtype if model is None else model_dtype(model)
    return dtype


def _keys_and_values(site: AttentionSite, form: CallForm, values: Values) -> tuple[KVSource, KVSource]:
    """Keys and values before repetition, with the same number of heads."""
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
            f"{site.where}: {sources[0].num_heads} heads of keys but {sources[1].num_heads} of values; their numbers must be equal"
        )
    return sources[0], sources[1]
