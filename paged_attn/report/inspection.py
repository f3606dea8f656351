"""`attention_layers` and `explain`: what was rewritten in a model, how it was proved, and which backend runs it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import NoAttention
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool, page_elements
from paged_attn.attn_ops.kv.layer_groups import LENGTH, LayerGroup
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.selection.requirements import Requirements
from paged_attn.backends.selection.select import select
from paged_attn.calling.call_signature import few_ids, takes, token_argument
from paged_attn.calling.uncompiled import CALL, uncompiled
from paged_attn.compiled.options import CompileOptions
from paged_attn.compiled_graph import CompiledGraph, recorded_graphs
from paged_attn.dynamo_backend import add_graphs, graphs_of
from paged_attn.engine.tracing.trace_failure import not_traced, unwrapped_refusals
from paged_attn.passes.fx.model_facts import model_device, model_dtype
from paged_attn.recurrent.states import ContextWithStates, states_of
from paged_attn.report.explanation import Explanation, GraphExplanation, ranges

MIB = 2**20

if TYPE_CHECKING:
    from paged_attn.engine.engine import Engine
    from paged_attn.engine.llm import LLM

TRACE_TOKENS = 6
PAGE_SIZE = 16  # the engine's default; a bare compiled model has none of its own


def attention_layers(compiled: nn.Module | LLM | Engine) -> tuple[AttentionSpec, ...]:
    """Return one spec per attention layer in layer-id order, as `KVPool` needs them.

    Args:
        compiled: what `torch.compile(model, backend="paged_attn")` returned, the model itself, an `LLM` or an `Engine`. A compiled
            model that has not seen a paged batch yet is traced here, once, and later batches share that compile.

    Raises:
        UnsupportedError: the model cannot run paged batches, or was compiled by another backend.
    """
    target = _engine_or_model(compiled)
    if not isinstance(target, nn.Module):
        return target.runner.layers
    model, graphs = _graphs(target)
    paged = _paged(model, graphs)
    (paged or graphs)[-1].refuse_recurrent()
    if not paged:
        raise UnsupportedError(f"{type(model).__name__} cannot run paged batches: {graphs[-1].rewrite.not_paged}")
    return paged[-1].specs


def explain(compiled: nn.Module | LLM | Engine) -> str:
    """Return a readable report: every layer with its proof, the backend and why, pieces, passes, and graphs that are not paged.

    Args and errors as in `attention_layers`, but a model whose calls cannot be paged is explained, not refused.
    """
    return explanation(compiled).text()


def explanation(compiled: nn.Module | LLM | Engine) -> Explanation:
    """Return what `explain` says as data."""
    from paged_attn.engine.runners.traced_runner import TracedRunner
    from paged_attn.hf.compiled_generate.paged_calls import PagedCalls

    target = _engine_or_model(compiled)
    calls = vars(target).get(CALL)
    if isinstance(calls, PagedCalls) and calls.engine is not None:
        found = explanation(calls.engine)
        how = f"  generate     of transformers runs on pages, {calls.num_steps} steps so far; other calls of the model run as written"
        return replace(found, capture=(*found.capture, how))
    if not isinstance(target, nn.Module):
        runner, selection = target.runner, target.selection
        graph = GraphExplanation.of(runner.compiled) if isinstance(runner, TracedRunner) else GraphExplanation.of_hooked(runner)
        name, capture = type(runner.model).__name__, tuple(target.step_runner.report().lines())
        return Explanation(name, (graph,), selection.backend.name, selection.describe(), capture, tuple(memory_lines(target)))
    model, graphs = _graphs(target)
    backend, reason = _auto_backend(model, graphs)
    refused = (f"  generate     runs without pages: {calls.refusal.why}",) if isinstance(calls, PagedCalls) and calls.refusal.why else ()
    return Explanation(type(model).__name__, tuple(map(GraphExplanation.of, graphs)), backend, reason, refused)


def _engine_or_model(compiled: object) -> Engine | nn.Module:
    from paged_attn.engine.engine import Engine
    from paged_attn.engine.llm import LLM

    if isinstance(compiled, LLM):
        return compiled.engine
    if isinstance(compiled, (Engine, nn.Module)):
        return compiled
    raise TypeError(f"got {type(compiled).__name__}; allowed are a (compiled) nn.Module, an LLM or an Engine")


def _graphs(compiled: nn.Module) -> tuple[nn.Module, list[CompiledGraph]]:
    """The model and its graphs, at least one of them; traces a paged call if no graph is one."""
    model = uncompiled(compiled)
    graphs = graphs_of(model)
    if _paged(model, graphs):
        return model, graphs
    if compiled is model and getattr(model, "_compiled_call_impl", None) is None:
        from paged_attn.engine.runners.traced_runner import TracedRunner

        return model, [*graphs, TracedRunner(model, CompileOptions(passes=("scans",))).compiled]
    _trace(compiled, model)
    graphs = graphs_of(model)
    if not graphs:
        raise UnsupportedError(
            f"{type(model).__name__} was not compiled by paged_attn, torch.compile is switched off, or Dynamo has given its call up, as it "
            f"does after {torch._dynamo.config.recompile_limit} forms of one code (of all models together from transformers 5.24 on). "
            'Compile it with torch.compile(model, backend="paged_attn"), or raise torch._dynamo.config.recompile_limit'
        )
    return model, graphs


def _paged(model: nn.Module, graphs: Sequence[CompiledGraph]) -> list[CompiledGraph]:
    """The graphs that run paged batches now: a graph traced with a model's RecurrentStates does so until they are closed."""
    states = states_of(model)
    return [graph for graph in graphs if graph.split is not None and graph.traced_with == ("" if states is None else states.name)]


def _trace(compiled: nn.Module, model: nn.Module) -> None:
    """Call it as `compiled(**batch.model_inputs())` is called later: any other form would be a second compile."""
    device, states = model_device(model), states_of(model)
    batch = Batch.build([BatchRequest(few_ids(model, TRACE_TOKENS, device).tolist(), [1], state_slot=1)], PAGE_SIZE, device)
    pool = KVPool((), 2, PAGE_SIZE, model_dtype(model), device)
    context = nullcontext() if states is None else ContextWithStates(batch, pool, NoAttention(), states, traced=True)
    token, given = token_argument(model), batch.model_inputs()
    inputs = {name: value for name, value in given.items() if name != "input_ids" and takes(model, name)}
    try:
        with torch.no_grad(), unwrapped_refusals(), context, recorded_graphs() as ran:
            compiled(**{token: given["input_ids"]}, **inputs)
    except ConstraintViolationError as failure:
        raise not_traced(model, failure) from failure
    add_graphs(model, ran)


def _auto_backend(model: nn.Module, graphs: list[CompiledGraph]) -> tuple[str | None, str]:
    specs = next((graph.specs for graph in reversed(graphs) if graph.split is not None), None)
    if specs is None:
        return None, "none is needed: no graph is paged"
    dtype = model_dtype(model)
    try:
        selection = select("auto", Requirements.of(specs, dtype, dtype, PAGE_SIZE, model_device(model)))
    except UnsupportedError as error:
        return None, str(error)
    return selection.backend.name, f"{selection.describe()} [what 'auto' picks for page size {PAGE_SIZE}]"


def memory_lines(engine: Engine) -> list[str]:
    """How pages and recurrent states share the memory, and who has the states now; how long keys last; then `page_lines`."""
    kv, slots = engine.kv, engine.budget.slots
    lines = [f"  memory       {engine.budget.describe(engine.pool.num_pages)}"]
    if slots.total:
        running, kept = kv.states.num_in_use, kv.states.num_snapshots
        free = slots.most_running - running - kept
        lines.append(f"               {running} states of requests, {kept} of kept prefixes, {free} slots free now")
    if borders := engine.limits.length_borders:
        more = " or ".join(f"{border:,}" for border in borders)
        lines.append(f"  longrope     a request of more than {more} tokens has other keys: one that comes to have more is recomputed")
    return [*lines, *page_lines(engine)]


def page_lines(engine: Engine) -> list[str]:
    """A line for each kind of group, with what it takes now, and one that says what a long request takes; none without groups."""
    pool, tokens, size = engine.pool, engine.limits.max_positions or LENGTH, engine.config.page_size
    if not pool.groups:
        return []
    tokens, frame_bytes = min(tokens, LENGTH), pool.page_elements * pool.dtype.itemsize
    kinds: dict[str, list[LayerGroup]] = {}
    for group in pool.groups:
        kinds.setdefault(group.keeps.describe(), []).append(group)
    lines = []
    for keeps, groups in kinds.items():
        pages, nbytes = engine.kv.use_by_retention(frame_bytes)[keeps]
        lines.append(f"  pages        {_tables(groups)} keep {keeps}: {pages:,} pages, {nbytes / MIB:,.1f} MiB now")
    each = sum(group.keeps.pages(tokens, size) for group in pool.groups) * frame_bytes
    before = -(-tokens // size) * page_elements(pool.layers, size) * pool.dtype.itemsize
    return [*lines, f"               a request of {tokens:,} tokens takes {each / MIB:,.1f} MiB, and {before / MIB:,.1f} with one table"]


def _tables(groups: Sequence[LayerGroup]) -> str:
    """`layers 0, 1 | 3, 4`: with a bar between tables."""
    return "layers " + " | ".join(ranges(group.layers) for group in groups)
