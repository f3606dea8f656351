"""What `explain` knows, as data: layer groups, graphs and the backend; `text` writes it for people, `dataclasses.asdict` for JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from paged_attn.capture.compiled_pieces.pieces import PieceReport
from paged_attn.compiled_graph import CompiledGraph
from paged_attn.passes.pass_list import PASSES
from paged_attn.passes.report import LayerReport, Rewrite
from paged_attn.recurrent.layer import RecurrentLayer

if TYPE_CHECKING:
    from paged_attn.engine.runners.runner import Runner

HOOKED = "transformers' attention interface (hooked, nothing is traced)"
HOOK_PROOF = "the mask function evaluated, the config compared, a ragged probe against the model itself"


@dataclass(frozen=True)
class EqualLayers:
    """Layers that are equal in everything but their ids and module paths; `modules` is one path with `{0-2,4}` where they differ."""

    layer_ids: tuple[int, ...]
    modules: str
    spec: str
    found_by: str
    proof: str
    declared: str

    @property
    def title(self) -> str:
        """`layer 3` or `layers 0-2, 4`."""
        return f"layer{'s' * (len(self.layer_ids) > 1)} {ranges(self.layer_ids)}"


@dataclass(frozen=True)
class RecurrentGroup:
    """Recurrent layers with the same states: their modules as in `EqualLayers`, and the bytes of one request's state in each of them."""

    count: int
    modules: str
    states: tuple[str, ...]
    request_bytes: int
    runs: str
    computed: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphExplanation:
    """One graph that Dynamo captured: what was rewritten in it, or why it is not paged (`not_paged` is then not empty).

    breaks: how often each op runs between pieces, in the order of the graph.
    besides: what optional passes did.
    as_written: experts that are no op: their modules as in `EqualLayers`, their class, and why.
    """

    layers: tuple[EqualLayers, ...]
    not_paged: str
    pieces: int
    compiled_by: str
    nodes_before: int
    nodes_after: int
    seconds: dict[str, float] = field(default_factory=dict)
    recurrent: tuple[RecurrentGroup, ...] = ()
    compiled: PieceReport | None = None
    breaks: dict[str, int] = field(default_factory=dict)
    besides: tuple[str, ...] = ()
    as_written: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return sum(len(group.layer_ids) for group in self.layers)

    @classmethod
    def of(cls, graph: CompiledGraph) -> GraphExplanation:
        found = graph.rewrite
        return cls(
            layers=equal_layers(found.layers),
            not_paged="" if graph.split is not None else found.not_paged,
            pieces=len(graph.split.pieces) if graph.split is not None else 0,
            compiled_by=graph.compiled_by,
            nodes_before=found.nodes_before,
            nodes_after=found.nodes_after,
            seconds=dict(found.seconds),
            recurrent=group_recurrent(graph.recurrent or ()),
            compiled=graph.pieces,
            breaks=dict(Counter(graph.split.ops)) if graph.split is not None else {},
            besides=besides(found),
            as_written=as_written(found),
        )

    @classmethod
    def of_hooked(cls, runner: Runner) -> GraphExplanation:
        """The explanation of a model whose attention is hooked: there is no graph, and the layers say what they compute."""
        reports = [LayerReport(i, spec, HOOKED, HOOK_PROOF, HOOK_PROOF, "", (), "") for i, spec in enumerate(runner.layers)]
        return cls(equal_layers(reports), "", 0, runner.runs_as, 0, 0)


@dataclass(frozen=True)
class Explanation:
    """A model's graphs, oldest first, and the backend: its name (None if there is none) and the words for why.

    pages: lines about how memory was divided, and about layers with page tables of their own.
    capture: lines about which steps run through captured graphs.
    """

    model: str
    graphs: tuple[GraphExplanation, ...]
    backend: str | None
    backend_reason: str
    capture: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()

    def text(self) -> str:
        """Lines for a terminal."""
        paged = [graph for graph in self.graphs if not graph.not_paged]
        lines = [f"{self.model}: {paged[-1].num_layers} attention layers rewritten" if paged else f"{self.model}: nothing was rewritten"]
        for number, graph in enumerate(paged):
            if len(paged) > 1:
                lines.append(f"  paged graph {number + 1} of {len(paged)}")
            for group in graph.layers:
                lines += [
                    f"  {group.title}  {group.modules}",
                    f"    computes   {group.spec}",
                    f"    found as   {group.found_by}",
                    f"    proved by  {group.proof}",
                    f"    declared   {group.declared}",
                ]
            for each in graph.recurrent:
                lines += [
                    f"  {each.count} recurrent layer{'s' * (each.count > 1)}  {each.modules}",
                    f"    state      {', '.join(each.states)}: {each.request_bytes:,} bytes per request in each layer",
                    f"    runs       {each.runs}",
                    *(f"    computes   {computed}" for computed in each.computed),
                ]
            total = sum(graph.seconds.values())
            passes = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in graph.seconds.items())
            if not graph.nodes_before:
                lines.append(f"  runs         {graph.compiled_by}")
                continue
            lines += [
                f"  pieces       {graph.pieces} between {break_words(graph.breaks)}, run as {graph.compiled_by}",
                *([f"  compiled     {graph.compiled.describe()}"] if graph.compiled is not None else []),
                f"  graph nodes  {graph.nodes_before} before, {graph.nodes_after} after",
                *([f"  besides      {', '.join(graph.besides)}"] if graph.besides else []),
                *(f"  as written   {each}" for each in graph.as_written),
                f"  passes       {total:.3f} s: {passes}",
            ]
        lines.append(f"  backend      {self.backend_reason}")
        lines += [*self.pages, *self.capture]
        other = ", for calls of another form" if paged else ""
        lines += [f"  not paged    a graph of {g.nodes_before} nodes{other}: {g.not_paged}" for g in self.graphs if g.not_paged]
        return "\n".join(lines)


def break_words(breaks: Mapping[str, int]) -> str:
    """`32 unified_attention, 1 mylib::experts`: our own ops go by their short names."""
    ours = "paged_attn::"
    names = {name: name.removeprefix(ours).removesuffix("_with_output") if name.startswith(ours) else name for name in breaks}
    return ", ".join(f"{count} {names[name]}" for name, count in breaks.items()) or "no split op"


def group_recurrent(layers: Iterable[RecurrentLayer]) -> tuple[RecurrentGroup, ...]:
    """Groups in the order of their first layers."""
    members: dict[tuple[object, ...], list[RecurrentLayer]] = {}
    for layer in layers:
        members.setdefault((layer.spec.states, layer.describe()), []).append(layer)
    return tuple(
        RecurrentGroup(
            len(group), _modules([layer.spec.module for layer in group]), tuple(s.describe() for s in group[0].spec.states),
            group[0].spec.nbytes, group[0].describe(), tuple(each.describe() for each in group[0].scans),
        )
        for group in members.values()
    )  # fmt: skip


def equal_layers(reports: Iterable[LayerReport]) -> tuple[EqualLayers, ...]:
    """Groups in the order of their first layers."""
    members: dict[tuple[object, ...], list[LayerReport]] = {}
    for report in reports:
        owner = report.spec.kv_layer if report.spec.kv_layer != report.layer_id else -1
        key = (replace(report.spec, kv_layer=owner, module=""), report.found_by, report.proof, report.declared)
        members.setdefault(key, []).append(report)
    return tuple(_equal(group) for group in members.values())


def _equal(reports: Sequence[LayerReport]) -> EqualLayers:
    first = reports[0]
    spec = first.spec.describe()
    if first.spec.kv_layer != first.layer_id:
        spec += f", reads the KV of layer {first.spec.kv_layer}"
    ids = tuple(report.layer_id for report in reports)
    return EqualLayers(ids, _modules([r.spec.module for r in reports]), spec, first.found_by, first.proof, first.declared)


def _modules(paths: Sequence[str]) -> str:
    """`model.layers.{0-2,4}.self_attn`, or all paths where they differ in more than one number."""
    parts = list(zip(*(path.split(".") for path in paths), strict=False))
    varying = [values for values in parts if len(set(values)) > 1]
    same_length = len({path.count(".") for path in paths}) == 1
    if not paths[0]:
        return "(module unknown)"
    if not varying and same_length:
        return paths[0]
    if not same_length or len(varying) > 1 or not all(re.fullmatch(r"\d+", value) for value in varying[0]):
        return ", ".join(dict.fromkeys(paths))
    numbers = ranges(sorted({int(value) for value in varying[0]}), separator=",")
    return ".".join(values[0] if len(set(values)) == 1 else f"{{{numbers}}}" for values in parts)


def ranges(ids: Sequence[int], separator: str = ", ") -> str:
    """Ascending ids with runs collapsed: (0, 1, 2, 4) -> "0-2, 4"."""
    runs: list[list[int]] = []
    for each in ids:
        if runs and each == runs[-1][-1] + 1:
            runs[-1].append(each)
        else:
            runs.append([each])
    return separator.join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def besides(found: Rewrite) -> tuple[str, ...]:
    """What was done to a graph beyond what paging needs."""
    done = {each.name: [each.did.format(found.counts[each.name])] for each in PASSES if found.counts[each.name]}
    done["experts"] = [f"{count} layers of experts are one op each, by {name}" for name, count in found.experts.items()]
    if found.merges:
        done["merge_linears"] = [f"{sum(len(merge.inputs) for merge in found.merges)} weights merged into {len(found.merges)}"]
    return tuple(words for each in PASSES for words in done.get(each.name, ()) if each.optional)


def as_written(found: Rewrite) -> tuple[str, ...]:
    """Blocks of experts that run as the model writes them, those with the same reason together."""
    paths: dict[str, list[str]] = {}
    for path, why in found.as_written.items():
        paths.setdefault(why, []).append(path)
    return tuple(
        f"{_modules(together)} ({kind}) is no op of experts: {why}"
        for (kind, _, why), together in ((reason.partition(": "), each) for reason, each in paths.items())
    )
