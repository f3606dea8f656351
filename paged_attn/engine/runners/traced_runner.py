"""The model of an engine: captured once, proved against itself, then called with its parameters bound and no guards."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.context import context_of
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.model_code import model_code
from paged_attn.attn_ops.specs.recompute import RecomputeSpec
from paged_attn.calling.body import Body
from paged_attn.calling.call_signature import few_ids, positions_are_optional, takes
from paged_attn.calling.left_as_it_was import left_as_it_was
from paged_attn.calling.plain_modes import as_served
from paged_attn.capture.inductor.pdl import pdl
from paged_attn.check.runs.steps import ProbeSettings
from paged_attn.check.runs.traced_served import TracedServed
from paged_attn.compiled.graph_inputs import GraphInputs, logits_of
from paged_attn.compiled.options import CompileOptions
from paged_attn.engine.model.causality import (
    OF_ALL_TOKENS,
    OF_CHOICES,
    OF_CHOSEN_TOKENS,
    refuse_acausal,
    refuse_both_directions,
    refuse_branches,
    refuse_random,
)
from paged_attn.engine.model.model_output import TokenIds, check_output
from paged_attn.engine.model.model_state import Difference
from paged_attn.engine.model.own_generate import refuse_other_generate
from paged_attn.engine.model.rows_of_logits import rows_of_logits
from paged_attn.engine.runners.merged_weights import bind_merged
from paged_attn.engine.tracing.on_all_tokens import AllTokensCall, modules_around
from paged_attn.engine.tracing.ropes_by_length import RopesByLength, dynamic_switches
from paged_attn.engine.tracing.trace_failure import CountsTokens, NotTraced, with_advice
from paged_attn.engine.tracing.trace_model import TRACE_TOKENS, only_device, trace_inputs, trace_model
from paged_attn.graph_cache.cached_graphs import CachedGraphs
from paged_attn.parallel.local_model import served_locally
from paged_attn.passes.find.attention_site import OtherTokens
from paged_attn.passes.fx.model_facts import least, model_dtype
from paged_attn.recurrent.as_ops.by_ops import with_ops
from paged_attn.recurrent.as_ops.state_dtype import with_state_dtype
from paged_attn.recurrent.as_ops.wrap import replaced_by_ops
from paged_attn.recurrent.discover import InputsOf, find_attribute_layers, find_recurrent_layers, refuse_recurrent, state_outside_layers
from paged_attn.recurrent.in_graphs import with_graphs
from paged_attn.recurrent.layer import RecurrentLayer
from paged_attn.recurrent.long_chunks import with_long_chunks
from paged_attn.recurrent.watching.call_parts import NotDriven, Undefined
from paged_attn.tolerances import logits_apart

logger = logging.getLogger("paged_attn")


class TracedRunner:
    """Runs ragged batches through a model, which stays as it was.

    Args:
        model: takes token ids [1, T], as input_ids or as its first parameter, and position_ids or not; on one device. Of a `Body`, which
            may attend in both directions, the logits are hidden states.
        follow_generate: what the model computes with position_ids 0, 1, ... is the truth, and not what it computes without any.
        probe: with which backend and pages the self-check runs.

    Raises:
        UnsupportedError: the model cannot be captured as one graph, has an attention that cannot be proved, or the self-check
            against the model itself fails.
    """

    follows_the_model = False

    def __init__(
        self, model: nn.Module, options: CompileOptions, follow_generate: bool = False, probe: ProbeSettings | None = None
    ) -> None:
        self.model, self.follow_generate, self.compares = model, follow_generate, options.self_check
        self.recurrent: tuple[RecurrentLayer, ...] = ()
        self.state_in_attributes = self.loops_on_all_tokens = False
        with ExitStack() as undo:
            self.ranks = undo.enter_context(served_locally(model))
            self.device = only_device(model)
            self.dtype = model_dtype(model)
            self.ropes = RopesByLength(model)
            self.length_borders = self.ropes.borders
            self.probe = replace(probe or ProbeSettings(), length_borders=self.ropes.borders)
            if isinstance(model, Body):
                refuse_recurrent(model.body, "an engine that embeds or classifies", "models with such state generate (task='generate')")
            self.token_ids = TokenIds(model.vocab_size, 0, model.num_ids) if isinstance(model, Body) else check_output(model)
            try:
                with pdl(options.pdl):
                    self._capture_with_state(options)
            except UnsupportedError as refusal:
                self._refuse_choices()
                if isinstance(refusal, OtherTokens):
                    refuse_acausal(model, 0, self.token_ids.tried, OF_CHOSEN_TOKENS)
                if isinstance(refusal, NotTraced):
                    refuse_acausal(model, 0, self.token_ids.tried, OF_ALL_TOKENS)
                    if not self.recurrent:  # without a trace there would be no room for states
                        raise with_advice(model, refusal) from refusal.__cause__
                raise
            if options.self_check:
                self._refuse_choices()
            self._leave: Callable[[], Any] = undo.pop_all().close
            if self.ranks is not None:  # there is something to undo, and a runner may be dropped without `close`
                self._leave = weakref.finalize(self, self._leave)
                self._leave.atexit = False

    def _capture_as_it_counts(self, options: CompileOptions) -> None:
        try:
            self._capture(options, positions=True)
        except UnsupportedError as refusal:
            follows = self.follow_generate and hasattr(self.model, "generate")  # then positions 0, 1, ... are the truth already
            if follows or not self._counts_otherwise(refusal):
                raise
            self._capture(options, positions=False)

    def _capture_with_state(self, options: CompileOptions) -> None:
        """A model that is refused as it is may keep its state in attributes: then these are kept for each request, and it is tried again.
        Raises UnsupportedError: also with truer words for a refused model that keeps its state where no request's can be told apart."""
        try:
            self._capture_as_it_counts(options)
        except UnsupportedError as refusal:
            with as_served(self.model):
                where = state_outside_layers(self.model, lambda length: trace_inputs(self.model, length, True))
            if where.startswith("the attribute") and not self.state_in_attributes:
                self.state_in_attributes = self.loops_on_all_tokens = True
                self._capture_as_it_counts(options)
                return
            if isinstance(refusal, CountsTokens) and not self.loops_on_all_tokens:
                self.loops_on_all_tokens = True  # nothing is known to keep what the loops carry from token to token
                self._capture_with_state(options)
                return
            if where and not self.recurrent and not isinstance(refusal, (NotDriven, Undefined)):
                raise UnsupportedError(
                    f"{type(self.model).__name__} keeps recurrent state in {where}; known are states in the cache of transformers, "
                    "in attributes, and those that a module is given and gives back: these can be kept for each request. Nothing was "
                    "generated."
                ) from refusal
            raise

    def _refuse_choices(self) -> None:
        """A choice of the best keys is one of the tokens alone, unless equal scores are told apart by how many there are."""
        compiled = getattr(self, "compiled", None)
        counts = [spec.chooses for spec in (compiled.specs if compiled else ()) if isinstance(spec, RecomputeSpec) and spec.chooses]
        if counts:
            refuse_acausal(self.model, min(counts), self.token_ids.tried, OF_CHOICES.format(min(counts)))

    def _capture(self, options: CompileOptions, positions: bool) -> None:
        def inputs_of(length: int) -> dict[str, Any]:
            return trace_inputs(self.model, length, positions)

        with as_served(self.model):
            self.recurrent, on_all = self._find_recurrent(inputs_of)
            if self.state_in_attributes:
                self.recurrent += find_attribute_layers(self.model, inputs_of)
            if "scans" in options.passes:
                self.recurrent = with_ops(self.recurrent, options.scans_backend)
            self.recurrent = with_state_dtype(self.recurrent, options.state_dtype)
            self.recurrent = with_graphs(with_long_chunks(self.recurrent))
        with as_served(self.model):
            # A graph from disk has no example values, from which its variant with adapters is made.
            no_disk = options.max_loras or self.state_in_attributes
            kept = None if no_disk else CachedGraphs.of(self.model, options, positions, self.recurrent)
        found = None if kept is None else kept.find()
        if self.ranks is not None and not self.ranks.all_say(found is not None):
            found = None  # ranks trace together, or none does
        stale: tuple[Path, UnsupportedError] | None = None
        if kept is not None and found is not None:
            self.compiled, args, path = found
            try:
                self._use(args)
                return
            except UnsupportedError as refusal:
                stale = path, refusal
        if options.runs_with is not None:
            options = replace(options, runs_with=replace(options.runs_with, recurrent=self.recurrent))
        with replaced_by_ops(self.recurrent), self.ropes.by_request():
            self.compiled, args = trace_model(self.model, options, positions, on_all, self.loops_on_all_tokens)
        self._use(args)
        if kept is not None:
            if stale is not None:  # the cached graph was refused, not the model
                logger.warning("the graph %s was not used, and the model was traced again: %s", *stale)
                kept.entries.remove(stale[0])
            kept.keep(self.compiled, args)

    def _find_recurrent(self, inputs_of: InputsOf) -> tuple[tuple[RecurrentLayer, ...], Mapping[str, AllTokensCall]]:
        """The layers with states, and the modules around those that cannot be run by themselves, which run on all tokens of a request."""
        around: dict[str, AllTokensCall] = {}
        while True:
            try:
                return find_recurrent_layers(self.model, inputs_of, beside=around), around
            except NotDriven as refusal:
                why = f"{refusal.modules[0]} keeps recurrent state, and {refusal.why}"
                more = modules_around(self.model, refusal.modules, inputs_of, why)
                if not more or more.keys() <= around.keys():
                    raise
                around |= more

    def _use(self, args: list[Any]) -> None:
        """Bind the model's tensors to the graph and prove it on numbers."""
        traced, args = args, bind_merged(args, self.compiled.merges)
        self.compiled.recurrent = self.recurrent
        if self.compiled.split is None:
            what = f"{type(self.model).__name__} cannot run paged batches: {self.compiled.rewrite.not_paged}"
            raise UnsupportedError(what + dynamic_switches(self.model))
        if not isinstance(self.model, Body):
            refuse_both_directions(self.compiled.specs)
            refuse_random(self.model, self.token_ids.tried)
            form = self.compiled.rewrite.form
            refuse_branches(self.model, form.min_tokens, self.token_ids.tried, form.excepted)
        self.inputs = GraphInputs(self.compiled.roles, args)
        self.takes_logits_rows = self.inputs.takes_logits_rows
        rewrite = self.compiled.rewrite
        self.layers, self.experts_per_choice, self.one_row = self.compiled.specs, rewrite.experts_per_choice, rewrite.counts["gemv"] > 0
        self.max_positions = least(self.compiled.max_positions, self.ropes.longest)
        self.max_rows = rewrite.form.max_tokens  # longer rows were not seen by the trace
        self._traced = GraphInputs(self.compiled.roles, traced)
        self._check(again=False)
        if self.compares and self.ranks is None and not isinstance(self.model, Body):
            refuse_other_generate(self.model, self.token_ids.tried, self.follow_generate, bool(self.recurrent))
        self.compiled.changed_numbers(self._traced.all)  # from now on

    def _check(self, again: bool) -> None:
        rows = torch.arange(TRACE_TOKENS, device=self.device)
        ids = few_ids(self.model, TRACE_TOKENS, self.device)
        args, traced = (inputs.fill(ids, rows, rows) for inputs in (self.inputs, self._traced))
        with as_served(self.model), left_as_it_was(self.model):
            self.compiled.check(args, lambda prompt: self.logits_alone(prompt, self.follow_generate), self.probe, traced, again)

    def logits_alone(self, prompt: Tensor, positions: bool = False) -> Tensor:
        """Logits [T, vocabulary] of a prompt [T] by the unmodified model, called as its users call it, or with position_ids 0, 1, ..."""
        what = f"{type(self.model).__name__} itself cannot be called on {len(prompt)} token ids"
        with model_code(lambda why: UnsupportedError(f"{what}: {why}")):
            return rows_of_logits(self.model, prompt, positions)

    def _counts_otherwise(self, refusal: UnsupportedError) -> bool:
        """Whether a model that was refused with position_ids 0, 1, ... numbers positions in another way when it is given none. Raises
        UnsupportedError: it does, and its `generate` gives them: then its users get two answers."""
        if not positions_are_optional(self.model) or not takes(self.model, "position_ids"):
            return False
        prompt = few_ids(self.model, 5, self.device)[1:]
        with as_served(self.model):
            without = self.logits_alone(prompt)
            try:
                given = self.logits_alone(prompt, positions=True)
            except UnsupportedError:
                return True  # **kwargs that lead to something that takes none
            again = self.logits_alone(prompt)
        error, limit = logits_apart(without, given, self.dtype)
        if error <= limit or not logits_apart(without, again, self.dtype)[0] <= limit:
            return False  # or it draws random numbers
        if hasattr(self.model, "generate") and "position_ids" in inspect.signature(self.model.forward).parameters:
            raise UnsupportedError(
                f"{type(self.model).__name__} called without position_ids gives other logits than with position_ids 0, 1, 2, ..., and its "
                "generate() passes those: generate() and a plain call model(input_ids) disagree about every token, so that there is no one "
                "answer to serve. LLM(model, follow_generate=True) gives generate()'s."
            ) from refusal
        return True

    @property
    def runs_as(self) -> str:
        return f"rewritten, {self.compiled.compiled_by}"

    def served(self) -> TracedServed:
        """The graph as it runs, for checks that look between its pieces."""
        return TracedServed(self.compiled, self.inputs, self.probe)

    @property
    def owned(self) -> dict[str, Tensor]:
        """The tensors that the graph takes from the model, named by their place among its inputs."""
        return {f"input {i}": tensor for i, tensor in enumerate(self.inputs.owned) if isinstance(tensor, Tensor)}

    def forward(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        """input_ids, positions [T] and logits_rows [N], int64 -> logits [N, vocabulary] of those rows, under a forward context."""
        context = context_of("TracedRunner.forward", len(input_ids))
        logits = logits_of(self.compiled.run_paged(context, self.inputs.fill(input_ids, positions, logits_rows)))
        return logits if self.takes_logits_rows else logits[logits_rows]

    def computes_the_same(self) -> bool:
        """Whether the graph gives the model's own logits yet."""
        try:
            self._check(again=True)
        except UnsupportedError as refusal:
            logger.info("compared again: %s", refusal)
            return False
        return True

    def changed_attention(self, found: Difference) -> list[str]:
        """Tensors whose numbers became part of a spec."""
        changed = self.compiled.changed_numbers(self._traced.all, counted=False) if found.written or found.moved else []
        names = {tensor.data_ptr(): name for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers())}
        return [f"other numbers were written into {names.get(tensor.data_ptr(), 'a tensor')}" for tensor in changed]

    def remember(self) -> None:
        """Nothing: the graph is compared with the model as it is."""

    def reads(self, name: str) -> bool:
        """Not a parameter that became part of a merged tensor: the graph reads that."""
        tensor = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}.get(name)
        return not self.compiled.merges or any(tensor is owned for owned in self.inputs.owned)

    def close(self) -> None:
        """Merged parameters stay views of one tensor; a sharded model gets its DTensors back. Again is harmless."""
        self._leave()
