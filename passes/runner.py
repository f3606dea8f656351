"""Runs the passes of `pass_list` over a copy of a graph: in order, timed, dumped if asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from paged_attn.passes.dump import Dump, dump_folder
from paged_attn.passes.fx.call_form import CallForm, CallNotPaged, find_call_form
from paged_attn.passes.fx.graph_tools import copy_graph_module, same_values, written_names
from paged_attn.passes.fx.read_values import ReadValues
from paged_attn.passes.optimize.dense_experts.replace import ChooseExperts
from paged_attn.passes.pass_list import PASSES
from paged_attn.passes.report import NO_PASSES, Facts, OptionalPasses, Rewrite

logger = logging.getLogger("paged_attn")


def rewrite(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    model: nn.Module | None,
    limited: bool = False,
    optional: OptionalPasses = NO_PASSES,
    choose_experts: ChooseExperts | None = None,
) -> Rewrite:
    """Rewrite a copy of a Dynamo graph; `gm` itself stays as it is.

    Args:
        limited: see `find_call_form`.
        optional: what else shall be done.
        choose_experts: see `Facts`.

    Raises:
        UnsupportedError: the model has an attention that can not be proved or replaced; the message names it.
    """
    form = find_call_form(gm.graph, limited)
    result = Rewrite(form, not_paged=form.reason, nodes_before=len(gm.graph.nodes))
    try:
        _rewrite_into(result, gm, example_inputs, model, optional, choose_experts)
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
    choose_experts: ChooseExperts | None,
) -> None:
    copied = copy_graph_module(gm)
    # Placeholders carry Dynamo's sources, which a copied graph loses: read the form again with the originals' help.
    form = _form_of_copy(result.form, gm.graph, copied.graph)
    placeholders = [n for n in copied.graph.nodes if n.op == "placeholder"]
    values = ReadValues(dict(zip(placeholders, example_inputs, strict=True)))
    facts = Facts(gm.graph, form, values, model, result, choose_experts=choose_experts)
    folder = dump_folder()
    dump = None if folder is None else Dump(folder, "graph" if model is None else type(model).__name__)
    if dump is not None:
        dump.write(copied.graph, "traced")
    for each in PASSES:
        if each.optional and each.name not in optional:
            continue
        started = time.perf_counter()
        said = each.run(copied.graph, facts)
        result.seconds[each.name] = time.perf_counter() - started
        logger.info("pass %s: %s (%.2f s)", each.name, said, result.seconds[each.name])
        if dump is not None:
            dump.write(copied.graph, each.name, said)
    copied.graph.lint()
    copied.recompile()
    result.gm, result.nodes_after = copied, len(copied.graph.nodes)
    result.traced = same_values(gm.graph, copied.graph)
    written = written_names(gm.graph)
    result.layers = [
        replace(report, operands=tuple(replace(each, late=each.name in written) for each in report.operands)) for report in result.layers
    ]
    logger.info("rewrote %d attention layers in %.2f s", len(facts.sites), sum(result.seconds.values()))


def _form_of_copy(form: CallForm, original: fx.Graph, copied: fx.Graph) -> CallForm:
    pairs = zip(
        (n for n in original.nodes if n.op == "placeholder"),
        (n for n in copied.nodes if n.op == "placeholder"),
        strict=True,
    )
    return replace(form, roles={new: form.roles[old] for old, new in pairs})
