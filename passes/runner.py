"""Runs the passes of `pass_list` over a copy of a graph: in order, timed, dumped if asked.

`PAGED_ATTN_DUMP=folder` writes the graph before and after each pass, with how many nodes of each kind there are.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import fx, nn

from paged_attn.attn_ops.errors import UnsupportedModule
from paged_attn.passes.fx.call_form import CallNotPaged, ReadValues, find_call_form
from paged_attn.passes.fx.graph_tools import copy_graph_module
from paged_attn.passes.fx.memory import same_values, written_names
from paged_attn.passes.optimize.dense_experts import ChooseExperts
from paged_attn.passes.pass_list import PASSES
from paged_attn.passes.report import Facts, Rewrite

logger = logging.getLogger("paged_attn")
_numbers = itertools.count()


def rewrite(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    model: nn.Module | None,
    limited: bool = False,
    optional: Collection[str] = (),
    choose_experts: ChooseExperts | None = None,
) -> Rewrite:
    """Rewrites a copy of a Dynamo graph; `gm` is not changed.

    Args:
        limited: see `find_call_form`.
        optional: names from `OPTIONAL` that also run. A graph rewritten with `latent_attention` needs a backend with Feature.MLA; after
            `merge_linears`, and after `experts` with stacked weights, the caller must merge weights: see `Rewrite.merges`.
        choose_experts: see `Facts`.

    Raises:
        UnsupportedError: the model has an attention that cannot be proved or replaced; the message names it.
    """
    form = find_call_form(gm.graph, limited)
    result = Rewrite(form, not_paged=form.reason, nodes_before=len(gm.graph.nodes))
    copied = copy_graph_module(gm)
    placeholders = [n for n in copied.graph.nodes if n.op == "placeholder"]
    # Roles come from Dynamo's sources, which a copied graph loses. Both graphs have their placeholders in the same order.
    form = replace(form, roles=dict(zip(placeholders, form.roles.values(), strict=True)))
    values = ReadValues(dict(zip(placeholders, example_inputs, strict=True)))
    facts = Facts(gm.graph, form, values, model, result, choose_experts=choose_experts)
    try:
        _run_passes(copied.graph, facts, optional)
    except CallNotPaged as reason:
        result.not_paged = result.not_paged or str(reason)
        if isinstance(reason.__cause__, UnsupportedModule):
            result.refused = reason.__cause__
        result.layers.clear()
        return result
    copied.graph.lint()
    copied.recompile()
    result.gm, result.nodes_after = copied, len(copied.graph.nodes)
    result.traced = same_values(gm.graph, copied.graph)
    written = written_names(gm.graph)
    result.layers = [
        replace(report, operands=tuple(replace(each, late=each.name in written) for each in report.operands)) for report in result.layers
    ]
    logger.info("rewrote %d attention layers in %.2f s", len(facts.sites), sum(result.seconds.values()))
    return result


def _run_passes(graph: fx.Graph, facts: Facts, optional: Collection[str]) -> None:
    dump = Dump("graph" if facts.model is None else type(facts.model).__name__)
    dump.write(graph, "traced")
    seconds = facts.result.seconds
    for each in PASSES:
        if each.optional and each.name not in optional:
            continue
        started = time.perf_counter()
        said = each.run(graph, facts)
        seconds[each.name] = time.perf_counter() - started
        if isinstance(said, int):
            facts.result.counts[each.name] = said
            said = each.did.format(said)
        logger.info("pass %s: %s (%.2f s)", each.name, said, seconds[each.name])
        dump.write(graph, each.name, said)


def dump_folder() -> Path | None:
    return Path(folder) if (folder := os.environ.get("PAGED_ATTN_DUMP")) else None


class Dump:
    """Numbered files of one graph in `PROCESS-NUMBER-MODEL/`: `00-traced.txt`, `01-specialise_numbers.txt`, ...; none unless requested."""

    def __init__(self, name: str) -> None:
        self._files = itertools.count()
        self.folder = dump_folder()
        if self.folder is not None:
            self.folder /= f"{os.getpid()}-{next(_numbers)}-{name}"
            self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, graph: fx.Graph, after: str, said: str = "") -> None:
        if self.folder is None:
            return
        counts = Counter(node._pretty_print_target(node.target) if node.op == "call_function" else node.op for node in graph.nodes)
        lines = [
            f"# after {after}" + (f": {said}" if said else ""),
            f"# {len(graph.nodes)} nodes",
            *(f"# {count:6,} {target}" for target, count in counts.most_common()),
            "",
            *(node.format_node() or "" for node in graph.nodes),
        ]
        self.folder.joinpath(f"{next(self._files):02}-{after}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
