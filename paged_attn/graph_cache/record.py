"""A captured graph as a record for the disk: the rewritten graph, what the passes found, and where its inputs come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, fx, nn

from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.dual_chunk import DualChunkSpec
from paged_attn.attn_ops.specs.latent import HeadRows, LatentSpec
from paged_attn.capture.compiled_pieces.artifacts import ArtifactCache
from paged_attn.capture.compiled_pieces.pieces import CachedPiece, load_pieces
from paged_attn.capture.split.split_graph import split_graph
from paged_attn.capture.split.split_ops import split_ops
from paged_attn.compiled.graph_inputs import PER_CALL, GraphInputs
from paged_attn.compiled.options import CompileOptions
from paged_attn.compiled_graph import CompiledGraph, recurrent_layer_ids
from paged_attn.graph_cache.graph_data import Data, graph_data, graph_of
from paged_attn.hashing.model_text import OwnedTensors
from paged_attn.hashing.stable_hasher import Indescribable
from paged_attn.passes.find.attention_site import modules_of
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.optimize.linears.merge import Merge
from paged_attn.passes.replace.operand_layout import Operand
from paged_attn.passes.report import LayerReport, Rewrite

PROBE_TOKENS = 3  # token ids that stand for those of the traced call
_NUMBERS = ("nodes_before", "nodes_after", "positions_redirected", "max_positions", "experts_per_choice")  # fields of `Rewrite`


def record_of(compiled: CompiledGraph, args: Sequence[Any], owned: OwnedTensors) -> Data:
    """Raises Indescribable where the graph, its layers or its inputs are not plain data, or a compiled piece is not on disk. `args`: the
    flat inputs of the traced call."""
    found = compiled.rewrite
    if found.gm is None or any(type(spec) not in (AttentionSpec, DualChunkSpec, LatentSpec) for spec in compiled.specs):
        raise Indescribable("a graph with layers of its own kind")
    if compiled.pieces is not None and compiled.pieces.kept is None:
        raise Indescribable("a graph of which some piece is compiled in each process")
    return {
        "graph": graph_data(found.gm),
        "original": graph_data(compiled.original),
        "traced": (traced := _compared(compiled)),
        "modules": modules_of(compiled.original.graph, traced.values()),
        "min_tokens": found.form.min_tokens,
        "inputs": [_input(role, arg, owned) for role, arg in zip(compiled.roles, args, strict=True)],
        "max_tokens": found.form.max_tokens,
        "layers": [asdict(layer) for layer in found.layers],
        "merges": [[list(merge.inputs), list(merge.rows)] for merge in found.merges],
        "numbers": {name: getattr(found, name) for name in _NUMBERS},
        "counts": found.counts,
        "experts": found.experts,
        "as_written": found.as_written,
        "evaluated": list(found.evaluated),
        "baked": list(found.baked),
        "pieces": None if compiled.pieces is None else [asdict(piece) for piece in compiled.pieces.kept or ()],
    }


def restored(
    record: Data, model: nn.Module, device: torch.device, options: CompileOptions, recurrent: int = 0
) -> tuple[CompiledGraph, list[Any]] | None:
    """The graph and its inputs, of this model; None if a compiled piece is gone. `recurrent`: layers of the model that are ops in the
    graph. Raises LookupError, ValueError, TypeError, AttributeError: for what `record_of` did not write."""
    gm = graph_of(record["graph"], device)
    split = split_graph(gm, split_ops())
    pieces = None
    if record["pieces"] is not None:
        kept = [CachedPiece(**{**piece, "arguments": tuple(piece["arguments"])}) for piece in record["pieces"]]
        cache = ArtifactCache.of_user()
        if cache is None or (pieces := load_pieces(split, kept, cache)) is None:
            return None
    found = _found(record, gm)
    owned = [OwnedTensors.at(model, each["tensor"]) if each["role"] == "owned" else None for each in record["inputs"]]
    ids = torch.arange(PROBE_TOKENS, device=device)
    args = GraphInputs(list(found.form.roles.values()), owned).fill(ids, ids, ids)
    original = graph_of(record["original"], device)
    if not (recurrent_layer_ids(gm.graph) | recurrent_layer_ids(original.graph)) <= set(range(recurrent)):
        raise ValueError(f"a graph of other recurrent layers than the model's {recurrent}")
    return CompiledGraph(original, found, split, pieces, model, options), args


def _compared(compiled: CompiledGraph) -> dict[str, str]:
    """What the self-check compares with the original graph, of all that stands for the same there."""
    assert compiled.split is not None
    names = {*compiled.split.op_names, *(name for names in compiled.split.results.values() for name in names)}
    return {name: original for name, original in compiled.rewrite.traced.items() if name in names}


def _found(record: Data, gm: fx.GraphModule) -> Rewrite:
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    roles = {node: str(each["role"]) for node, each in zip(placeholders, record["inputs"], strict=True)}
    return Rewrite(
        CallForm("T", roles, "", record["max_tokens"], record["min_tokens"]), gm, [_layer(layer) for layer in record["layers"]],
        merges=tuple(Merge(tuple(inputs), tuple(rows)) for inputs, rows in record["merges"]),
        experts=dict(record["experts"]), as_written=dict(record["as_written"]),
        evaluated=tuple(record["evaluated"]), baked=tuple(record["baked"]), traced=dict(record["traced"]),
        modules=dict(record["modules"]), counts=Counter(record["counts"]),
        **{name: record["numbers"][name] for name in _NUMBERS},
    )  # fmt: skip


def _layer(data: Data) -> LayerReport:
    operands = tuple(Operand(**operand) for operand in data["operands"])
    order = tuple(data["original_order"])
    return LayerReport(**{**data, "spec": _spec(data["spec"]), "original_order": order, "operands": operands})


def _spec(data: Data) -> AttentionSpec:
    known = dict(data)
    if known["alibi_slopes"] is not None:
        known["alibi_slopes"] = tuple(known["alibi_slopes"])
    if "rotated" not in known:
        return (DualChunkSpec if known["chunk_part"] == "all" else AttentionSpec)(**known)
    return LatentSpec(**known | {name: known[name] and HeadRows(*known[name]) for name in ("keys", "values")})


def _input(role: str, arg: Any, owned: OwnedTensors) -> Data:
    if role in PER_CALL:
        return {"role": role}
    if role != "owned" or not isinstance(arg, Tensor):
        raise Indescribable(f"a graph that takes a {type(arg).__name__} as {role}")
    return {"role": role, "tensor": owned.path_of(arg)}
