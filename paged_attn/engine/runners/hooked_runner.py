"""The model of an engine with eager breaks: the Hugging Face module as it is, under `paged_attn.patch`, without torch.compile."""

from __future__ import annotations

import inspect
import weakref
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.context import current_context
from paged_attn.attn_ops.errors import ContextError, UnsupportedError
from paged_attn.attn_ops.model_code import model_may_fail
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.calling.call_signature import plain_inputs, takes, token_argument
from paged_attn.calling.hf_configs import attention_configs
from paged_attn.calling.plain_modes import as_served, evaluating
from paged_attn.check.hooked import HookedServed, TappedModel
from paged_attn.check.runs.steps import ProbeSettings
from paged_attn.compiled.options import CompileOptions
from paged_attn.compiled_graph import _check_layers
from paged_attn.engine.model.causality import OF_ALL_TOKENS, refuse_acausal, refuse_both_directions, refuse_random
from paged_attn.engine.model.model_output import check_output
from paged_attn.engine.model.model_state import Difference
from paged_attn.engine.tracing.ropes_by_length import RopesByLength
from paged_attn.engine.tracing.trace_model import call_model, only_device
from paged_attn.hf.patch import NAME, Patched
from paged_attn.parallel.local_model import served_locally
from paged_attn.passes.fx.model_facts import least, max_positions, model_dtype
from paged_attn.recurrent.discover import refuse_recurrent
from paged_attn.recurrent.layer import RecurrentLayer
from paged_attn.tolerances import logits_apart

PROBE_ROWS = 24
LOGITS_ROWS = [3, 0, 3, 23]  # out of order and repeated, so that no slice gives the same rows


class HookedRunner:
    """Runs ragged batches through a Hugging Face model that needs no trace. The model is patched from construction to `close`.

    Calls of the model outside forward contexts compute meanwhile what they did before.

    Args:
        model: a PreTrainedModel on one device that takes position_ids and does attention through transformers' AttentionInterface.
        options: `inductor=True` is an error, as nothing is compiled.
        follow_generate: what the model computes with position_ids 0, 1, ... is the truth, and not what it computes without any.
        probe: with which backend and pages the self-check runs.

    Attributes, besides those of `Runner`:
        takes_logits_rows: the model computes the wanted rows of logits alone; otherwise it computes all, and `forward` picks.

    Raises (the model is then as it was):
        UnsupportedError: `paged_attn.patch` refuses the model; or it attends in both directions, has recurrent state, numbers positions
            in another way when it is given none, or a row depends on the positions of other requests.
        ContextError: the model is patched already.
        ValueError: options that ask for compiled pieces.
    """

    recurrent: tuple[RecurrentLayer, ...] = ()
    max_rows: int | None = None
    runs_as = "hooked, not compiled"
    one_row = False
    experts_per_choice = 0
    follows_the_model = True

    def __init__(
        self, model: nn.Module, options: CompileOptions, follow_generate: bool = False, probe: ProbeSettings | None = None
    ) -> None:
        if options.inductor:
            raise ValueError("inductor=True asks for compiled pieces, but with eager breaks nothing is compiled; leave one of them out")
        self.model, self.follow_generate = model, follow_generate
        with ExitStack() as undo:
            self.ranks = undo.enter_context(served_locally(model))
            self.device = only_device(model)
            self.dtype = model_dtype(model)
            ropes = RopesByLength(model)
            self.length_borders = ropes.borders
            self.max_positions = least(max_positions(model), ropes.longest)
            probe = replace(probe or ProbeSettings(), length_borders=ropes.borders)
            patched = self._patched = Patched(model, options.self_check, probe)
            self.token_ids = check_output(model, may_pick_rows=False)
            self._token = token_argument(model)
            self._more: dict[str, Any] = {"use_cache": False} if takes(model, "use_cache") else {}
            refuse_recurrent(model, "an engine with eager breaks")
            refuse_random(model, self.token_ids.tried)
            with as_served(model):
                undo.enter_context(ropes.by_request())
                try:
                    undo.enter_context(patched)
                except UnsupportedError:
                    if patched.layers:  # each was proved, and the numbers are others nevertheless
                        refuse_acausal(model, 0, self.token_ids.tried, OF_ALL_TOKENS)
                    raise
                self.layers = patched.layers
                refuse_both_directions(patched.layers)
                if options.self_check:
                    self._check_numbering()
                self.takes_logits_rows = self._keeps_chosen_rows()
            self._configs = attention_configs(model)
            self.remember()
            self._accepted: tuple[AttentionSpec, ...] | None = None
            # Not a method of self: an engine that is dropped without `close` gives its model back, too.
            self._leave = weakref.finalize(self, undo.pop_all().close)
            self._leave.atexit = False

    @property
    def owned(self) -> dict[str, Tensor]:
        """The model's parameters and buffers of this moment, by qualified name; tied ones under each of their names."""
        tensors: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        return {**tensors, **dict(self.model.named_buffers(remove_duplicate=False))}

    def forward(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        """input_ids, positions [T], logits_rows [N], all int64 -> logits [N, vocabulary]; inside a ForwardContext of T rows. Raises
        ContextError: no context, a pool of other layers, a closed runner, or a model whose attention was switched meanwhile."""
        self._check_call()
        training = any(module.training for module in self.model.modules())
        with evaluating(self.model) if training else nullcontext():
            if self.takes_logits_rows:
                return self._call(input_ids, positions, logits_to_keep=logits_rows)
            return self._call(input_ids, positions)[logits_rows]

    def served(self) -> HookedServed:
        """The model as it runs, for checks that look inside."""
        return HookedServed(TappedModel(self._patched), self._patched.settings)

    def computes_the_same(self) -> bool:
        """Whether the model's logits of a few tokens are what they were when it was last remembered."""
        error, limit = logits_apart(self._remembered, self._few_logits(), self.dtype)
        return error <= limit

    def changed_attention(self, found: Difference) -> list[str]:
        """Layers that attend otherwise now than was proved; modules that took the place of others are known from here on."""
        if not (found.replaced or found.altered):
            return []
        with as_served(self.model):
            others = self._patched.record_again()
        return [f"{'; '.join(found.replaced + found.altered)}, with which {' and '.join(others)} would attend otherwise"] if others else []

    def remember(self) -> None:
        """Keep the model's logits of a few tokens."""
        self._remembered = self._few_logits()

    def reads(self, name: str) -> bool:
        """Always: the model itself is called."""
        return True

    def _few_logits(self) -> Tensor:
        with as_served(self.model):
            return self._call(*self._probe_rows())

    def close(self) -> None:
        """Leave the patch; the model is as it was found. Again is harmless."""
        self._leave()

    def _call(self, input_ids: Tensor, positions: Tensor, **more: Any) -> Tensor:
        """Logits [T, vocabulary], or fewer where `more` says so."""
        return call_model(self.model, {self._token: input_ids[None], "position_ids": positions[None], **self._more, **more})[0]

    def _check_call(self) -> None:
        context = current_context()
        if context is None:
            raise ContextError(
                "HookedRunner.forward was called outside any forward context, where its rows would attend to each other; "
                "call it inside ForwardContext(batch, pool, backend)"
            )
        if not self._leave.alive:
            raise ContextError(f"this runner was closed, and {type(self.model).__name__} is no longer patched; make another runner")
        if any(config._attn_implementation != NAME for config in self._configs):
            raise ContextError(
                f"the attention implementation of {type(self.model).__name__} was set to another one while an engine serves it; "
                "close the engine first"
            )
        if context.pool.layers is not self._accepted:
            _check_layers(self.layers, context.pool.layers)
            self._accepted = context.pool.layers

    def _check_numbering(self) -> None:
        """Called without position_ids the model means 0, 1, ..., which is what a batch has."""
        ids, rows = self._probe_rows()
        plain = call_model(self.model, plain_inputs(self.model, ids, self.follow_generate))[0]
        error, limit = logits_apart(plain, self._call(ids, rows), self.dtype)
        if not error <= limit:
            raise UnsupportedError(
                f"{type(self.model).__name__} called without position_ids gives other logits than with position_ids 0, 1, 2, ..., which is "
                "all that eager breaks have. LLM(model, follow_generate=True) takes the latter; LLM(model) without eager breaks lets the "
                "model count."
            )

    def _keeps_chosen_rows(self) -> bool:
        """Whether forward has logits_to_keep and computes for a tensor of rows what it computes for them among all."""
        if "logits_to_keep" not in inspect.signature(self.model.forward).parameters:
            return False
        ids, positions = self._probe_rows()
        rows = torch.tensor([row for row in LOGITS_ROWS if row < len(ids)], device=self.device)
        expected = self._call(ids, positions)[rows]
        with model_may_fail() as failures:  # it may take a number alone
            chosen = self._call(ids, positions, logits_to_keep=rows)
        if failures or chosen.shape != expected.shape:
            return False
        error, limit = logits_apart(expected, chosen, self.dtype)
        return error <= limit

    def _probe_rows(self) -> tuple[Tensor, Tensor]:
        """Token ids and positions 0, 1, ... [T], int64, within the model's positions."""
        positions = torch.arange(min(PROBE_ROWS, self.max_positions or PROBE_ROWS), device=self.device)
        return positions % 5 + 1, positions
