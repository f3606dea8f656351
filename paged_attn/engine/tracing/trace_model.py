"""Captures a model once as a single graph with a symbolic number of tokens."""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode

from paged_attn.attn_ops.errors import UnsupportedError, UnsupportedModule
from paged_attn.attn_ops.model_code import model_may_fail
from paged_attn.attn_ops.specs.recompute import RecomputeSpec
from paged_attn.calling.call_signature import few_ids, plain_inputs, takes
from paged_attn.calling.hf_configs import attention_implementation
from paged_attn.calling.left_as_it_was import left_as_it_was
from paged_attn.calling.plain_configs import plain_configs
from paged_attn.calling.plain_modes import as_served
from paged_attn.compiled.options import CompileOptions
from paged_attn.compiled_graph import CompiledGraph
from paged_attn.engine.model.rows_of_logits import gives_last_alone, logits_in
from paged_attn.engine.tracing.einx_calls import any_length
from paged_attn.engine.tracing.experts_as_ops import experts_as_ops
from paged_attn.engine.tracing.last_token import for_all_tokens
from paged_attn.engine.tracing.looping.as_ops import looping_experts_as_ops
from paged_attn.engine.tracing.on_all_tokens import AllTokensCall, modules_around, on_all_tokens
from paged_attn.engine.tracing.opaque_modules import NeedsWholeRequest, class_running, line_of, modules_as_ops, untraceable_class
from paged_attn.engine.tracing.ops_without_fakes import OpsWithoutFakes
from paged_attn.engine.tracing.repeated.expand import expand
from paged_attn.engine.tracing.repeated.find import AlikeLayers, alike_layers
from paged_attn.engine.tracing.repeated.marks import marked
from paged_attn.engine.tracing.repeated.same_code import NotAlike, guards_of_trace
from paged_attn.engine.tracing.trace_failure import CountsTokens, counts_parts, fails_in, lacks_fake, not_traced, unwrapped_refusals
from paged_attn.engine.tracing.while_tracing import (
    dynamo_unlogged,
    messages,
    no_collections,
    open_multihead_attention,
    plain_buffers,
    plain_is_causal,
)
from paged_attn.passes.fx.model_facts import max_positions
from paged_attn.passes.positions.independent_rows import MixesRows
from paged_attn.passes.prove.mask_probe import ShortTable
from paged_attn.passes.report import Rewrite
from paged_attn.stopwatch import part

logger = logging.getLogger("paged_attn")
TRACE_TOKENS = 6
FEW_POSITIONS = 512  # rather than be limited to fewer, a model runs modules that mix tokens in longer calls unchanged, on all tokens
NONE: Mapping[str, AllTokensCall] = types.MappingProxyType({})
LONGEST_TRACE = 1 << 20
PARTS = 3  # traces, each for longer calls than the one before and for none of its, that say that code runs once for so many tokens
LONGEST_TRIED = 4096  # tokens of a call that only checks whether the model can run it


class _Captured(Exception):
    """Ends the traced call before it computes anything."""


@part("trace")
def trace_model(
    model: nn.Module, options: CompileOptions, positions: bool = True, on_all: Mapping[str, AllTokensCall] = NONE, loops: bool = True
) -> tuple[CompiledGraph, list[Any]]:
    """Trace with T and the number of logits rows symbolic; returns the graph and the flat inputs of the traced call.

    A model whose attention is set to another implementation (eager, which writes the softmax out) is traced with SDPA instead where
    transformers offers that, and set back; the self-check compares with the model as it was found.

    Args:
        positions: give position_ids where forward takes them; without, the model counts its own, which become the batch's.
        on_all: modules that run on all tokens of a request.
        loops: modules that loop over tokens do so, too; else CountsTokens is raised.

    Raises:
        UnsupportedError: no single graph, an attention that cannot be proved, or a forward that needs more than tokens and positions.
    """
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", "sdpa")
    try:
        return _capture_with_workarounds(model, options, positions, on_all, loops)
    except UnsupportedError as refusal:
        if implementation == "sdpa" or not hasattr(model, "set_attn_implementation"):
            raise
        try:
            with attention_implementation(model, "sdpa"):
                logger.info("tracing with attn_implementation='sdpa' instead of %r", implementation)
                return _capture_with_workarounds(model, options, positions, on_all, loops)
        except (UnsupportedError, ValueError, ImportError):
            raise refusal from None


def _capture_with_workarounds(
    model: nn.Module, options: CompileOptions, positions: bool, on_all: Mapping[str, AllTokensCall], loops: bool
) -> tuple[CompiledGraph, list[Any]]:
    workarounds = Workarounds(model, options, positions, on_all, loops)
    while True:
        try:
            with workarounds.applied():
                compiled, args = _capture_all_lengths(model, options, positions)
            if (refused := compiled.rewrite.refused) is None or not workarounds.add_for(refused):
                compiled.rewrite.as_written = workarounds.experts_as_written(compiled.rewrite)
                _say_on_all_tokens(workarounds.on_all, compiled.rewrite)
                return compiled, args
        except UnsupportedError as refusal:
            if not workarounds.add_for(refusal):
                raise


class Workarounds:
    """What a model is traced with in place of code that cannot be traced.

    Attributes:
        opaque: classes of modules whose forward branches on its data, and where: each module is called as one op.
        on_all: modules that run whole on all tokens of a request.
        unknown: custom ops that run by themselves, because torch knows too little of them; None until one is met.
        blocks: names of loops over experts that were made ops, and of their code; find_experts: whether experts are.
        left: blocks of experts that stay as they are, and why; `before`: of earlier traces; modules_of_experts: how many other modules
            were made ops.
    """

    def __init__(
        self, model: nn.Module, options: CompileOptions, positions: bool, on_all: Mapping[str, AllTokensCall], loops: bool
    ) -> None:
        self.model, self.options, self.positions, self.on_all, self.loops = model, options, positions, on_all, loops
        self.opaque: dict[type[nn.Module], str] = {}
        self.unknown: OpsWithoutFakes | None = None
        self.blocks: Mapping[str, str] = {}
        self.left: dict[str, str] = {}
        self.before: dict[str, str] = {}
        self.modules_of_experts = 0
        self.find_experts = "experts" in options.passes

    def inputs(self, length: int) -> dict[str, Any]:
        return trace_inputs(self.model, length, self.positions)

    @contextmanager
    def applied(self) -> Iterator[None]:
        model, backend = self.model, self.options.experts_backend
        with ExitStack() as stack:
            stack.enter_context(as_served(model))
            self.before |= self.left
            self.blocks, self.modules_of_experts, self.left = {}, 0, {}
            if self.find_experts:
                self.modules_of_experts = stack.enter_context(experts_as_ops(model, backend))
                self.blocks = stack.enter_context(looping_experts_as_ops(model, self.inputs, backend, self.left, self.on_all))
            stack.enter_context(modules_as_ops(model, self.opaque, self.inputs))
            if self.unknown is not None:
                stack.enter_context(self.unknown.with_fakes())
            stack.enter_context(on_all_tokens(model, self.on_all))
            yield

    def experts_as_written(self, rewrite: Rewrite) -> dict[str, str]:
        """What `left` is, and what runs on all tokens, unless a pass found more experts in the graph: those may be the same ones."""
        if sum(rewrite.experts.values()) > self.modules_of_experts + len(self.blocks):
            return {}
        return self.left | {path: why for path, why in self.before.items() if path in self.on_all}

    def add_for(self, refusal: UnsupportedError) -> bool:
        """Add what the refusal of a trace calls for; False if nothing is known against it."""
        if isinstance(refusal, (NeedsWholeRequest, UnsupportedModule, CountsTokens)):
            return self._run_on_all_tokens(refusal)
        cause = refusal.__cause__
        if self.unknown is None and lacks_fake(cause):
            with as_served(self.model):
                self.unknown = OpsWithoutFakes(self.model, self.inputs)
            logger.info("custom ops without a fake run by themselves: %s", ", ".join(map(str, self.unknown.calls)))
            return True
        if fails_in(self.blocks.values(), cause):
            names = ", ".join(self.blocks)
            logger.warning("%s stay as they are: what they compute around their experts cannot be traced: %s", names, refusal)
            self.find_experts = False
            return True
        kind = untraceable_class(self.model, cause)
        if kind is None or kind in self.opaque:
            return False
        self.opaque[kind] = line_of(cause)
        logger.info("%s branches on its data%s: it runs as one op, between the captured pieces", kind.__name__, self.opaque[kind])
        return True

    def _run_on_all_tokens(self, refusal: NeedsWholeRequest | UnsupportedModule | CountsTokens) -> bool:
        modules = dict(self.model.named_modules())
        mixes: type[nn.Module] | None
        if isinstance(refusal, NeedsWholeRequest):
            mixes = refusal.kind
            self.opaque.pop(mixes)
        elif isinstance(refusal, CountsTokens):
            mixes = class_running(self.model, refusal.frames) if self.loops else None  # a loop over tokens, whatever it does with them
        else:
            mixes = type(modules[refusal.module]) if refusal.module in modules else None
        if mixes is None:
            return False
        around = modules_around(self.model, [name for name, module in modules.items() if type(module) is mixes], self.inputs)
        if not around or around.keys() <= self.on_all.keys():
            return False
        self.on_all = {**self.on_all, **around}
        return True


def _say_on_all_tokens(calls: Mapping[str, AllTokensCall], rewrite: Rewrite) -> None:
    specs = [spec for spec in rewrite.specs if isinstance(spec, RecomputeSpec) and spec.module in calls]
    slow = [spec.module for spec in specs if spec.reach is None]
    if slow:
        why = next((f" ({calls[path].why})" for path in slow if calls[path].why), "")
        logger.warning(
            "in every step all tokens of a request run through %s, which mix them in ways of their own: "
            "a token costs more the later it comes%s",
            ", ".join(slow),
            why,
        )
    if few := [f"{spec.module} ({spec.reach})" for spec in specs if spec.reach is not None]:
        logger.info("in every step the new tokens, and so many before them, run through %s", ", ".join(few))


def _capture_all_lengths(model: nn.Module, options: CompileOptions, positions: bool) -> tuple[CompiledGraph, list[Any]]:
    """A trace that holds for short calls only (a model that builds no mask below its window) is made again beyond that length.

    Where each trace holds for a part of the lengths only, the model makes another graph for each number of blocks: CountsTokens is raised.
    A model that cannot run beyond it has no more positions (it asserts that, or slices a table), and its short trace is all there is.
    """
    length, limited, layers, parts, end = TRACE_TOKENS, False, _alike(model, positions), 0, 0
    best: tuple[CompiledGraph, list[Any]] | None = None  # holds as far as a table of the model goes
    while True:
        try:
            compiled, args = _capture(model, options, trace_inputs(model, length, positions), limited, layers)
        except UnsupportedError as refusal:
            if isinstance(refusal, MixesRows) and length < FEW_POSITIONS:
                raise
            if best is not None:
                _say_limit(model, length - 2, positions, refusal)
                return best
            if length == TRACE_TOKENS:
                if not isinstance(refusal, ShortTable) or not _runs(model, refusal.length + 1, positions):
                    raise
                length = refusal.length + 2  # the table may be left in the model from calls with this many tokens
                continue
            short = _capture(model, options, trace_inputs(model, TRACE_TOKENS, positions), True, layers)
            logger.warning(
                "%s can only be captured for up to %d positions, though it runs longer calls itself: %s",
                type(model).__name__,
                length - 2,
                refusal,
            )
            return short
        bound, parts = compiled.rewrite.form.max_tokens, parts + 1 if compiled.rewrite.form.min_tokens > end else 0
        if bound is not None and parts > PARTS:
            raise counts_parts(model, args, compiled.rewrite.form.min_tokens, bound)
        end = bound or 0
        if best is not None and compiled.split is None and bound is None:
            return best
        if bound is None or bound >= LONGEST_TRACE or limited:
            return compiled, args
        stated = max_positions(model)
        if compiled.split is not None:
            if stated is not None and stated <= bound:
                return compiled, args
            best = compiled, args  # a table that ends there may be one that grows in forward, which a longer trace shows
        elif (stated is not None and stated <= bound) or not _runs(model, bound + 1, positions):
            length, limited = min(length, bound), True
            continue
        length = bound + 2


def _say_limit(model: nn.Module, bound: int, positions: bool, refusal: UnsupportedError) -> None:
    """A trace ends with a table of the model, which is all the positions that it has, unless it runs longer calls itself."""
    longer = bound <= LONGEST_TRIED and _runs(model, bound + 1, positions)
    more = ", though it runs longer ones itself" if longer else ""
    log = logger.warning if longer else logger.info
    log("%s is served for up to %d positions, where a table of it ends%s: %s", type(model).__name__, bound, more, refusal)


def _runs(model: nn.Module, length: int, positions: bool) -> bool:
    """Whether the model itself takes that many tokens. A table that grows stays grown, so that its trace reads rows of it."""
    with model_may_fail() as failures, as_served(model):
        model(**trace_inputs(model, length, positions))
    for error in failures:
        logger.info("%s has no more than %d positions: %s", type(model).__name__, length - 1, error)
    return not failures


def call_model(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The logits of a call, whatever the model wraps them in."""
    logits: Tensor = logits_in(model(**inputs))
    return logits


def _call_and_mark(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """What is traced: the same, with a node of its own for what is returned."""
    marked: Tensor = torch.ops.aten.alias(call_model(model, inputs))
    return marked


def only_logits(gm: fx.GraphModule) -> None:
    """Make what `_call_and_mark` returns the only output of its trace, and not what a model keeps of the call (a bias, the last loss)."""
    *_, returned = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.alias)
    gm.graph.output_node().args = ((returned.args[0],),)  # the rest stays for now: what vmap leaves and enters has no users
    gm.recompile()


def only_device(model: nn.Module) -> torch.device:
    """The one device of a model's tensors; UnsupportedError if there are several, or none that holds data."""
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        way = "model.to(device)"
        if any(device.type == "meta" for device in devices):
            way = "load it without offloading, since what lies on meta holds no numbers"
        elif any(hasattr(module, "_hf_hook") for module in model.modules()):
            way = "accelerate.hooks.remove_hook_from_submodules(model), then model.to(device)"
        raise UnsupportedError(
            f"the model lies on {sorted(map(str, devices)) or 'no device'}; an engine needs all of it on one device: {way}"
        )
    return devices.pop()


def _alike(model: nn.Module, positions: bool) -> list[AlikeLayers]:
    """Alike layers of a model that runs a short call; one that does not has none, and its trace says why it does not."""

    def call() -> None:
        model(**trace_inputs(model, TRACE_TOKENS, positions))  # no longer one: it may have no more positions

    with model_may_fail() as failures, as_served(model), left_as_it_was(model):
        return alike_layers(model, call)
    logger.info("every layer is traced: a call of %d tokens fails: %s", TRACE_TOKENS, failures[0])
    return []


def _capture(
    model: nn.Module, options: CompileOptions, inputs: dict[str, Any], limited: bool, layers: Sequence[AlikeLayers]
) -> tuple[CompiledGraph, list[Any]]:
    """With layers that are alike traced twice; all of them, if they turn out to be otherwise or that makes no trace."""
    if layers:
        try:
            return _traced(model, options, inputs, limited, layers)
        except (UnsupportedError, NotAlike) as reason:
            logger.info("every layer is traced: %s", reason)
    return _traced(model, options, inputs, limited)


def _traced(
    model: nn.Module, options: CompileOptions, inputs: dict[str, Any], limited: bool, layers: Sequence[AlikeLayers] = ()
) -> tuple[CompiledGraph, list[Any]]:
    captured: list[tuple[CompiledGraph, list[Any]]] = []
    wanted = [(model, options, limited)]  # emptied below: Dynamo keeps every backend it was ever given, and everything it refers to
    failed: list[NotAlike] = []

    def stop(*_: Any) -> NoReturn:
        raise _Captured

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        if layers:
            try:
                gm, example_inputs = expand(gm, example_inputs, wanted[0][0], layers, numbers, guards_of_trace())
            except NotAlike as reason:
                failed.append(reason)
                return stop
        only_logits(gm)
        if gives_last_alone(wanted[0][0]):
            for_all_tokens(gm)
        compiled = CompiledGraph.of_trace(gm, example_inputs, *wanted[0])
        mixes = compiled.rewrite.mixes
        if mixes is not None and (mixes.module or not mixes.by_position or not compiled.options.self_check):
            raise mixes  # otherwise the self-check refuses it, and says what to set
        captured.append((compiled, list(example_inputs)))
        return stop

    # Dynamo counts recompiles per code object; a copy keeps engines from using up each other's limit.
    target = types.FunctionType(_call_and_mark.__code__.replace(), _call_and_mark.__globals__)
    # What other models in this process looked like must not make this one's numbers symbolic.
    settings = torch._dynamo.config.patch(automatic_dynamic_shapes=False, ignore_logger_methods=messages())
    try:
        with (
            as_served(model), plain_buffers(model), settings, unwrapped_refusals(), no_collections(), dynamo_unlogged(), any_length(),
            open_multihead_attention(), plain_is_causal(), plain_configs(model),
            marked(model, layers) as numbers,
        ):  # fmt: skip
            torch.compile(target, backend=backend, fullgraph=True)(model, inputs)
    except _Captured:
        if failed:
            raise failed[0] from None
        return captured.pop()
    except torch._dynamo.exc.BackendCompilerFailed:
        raise
    except (torch._dynamo.exc.TorchDynamoException, ConstraintViolationError, GuardOnDataDependentSymNode) as failure:
        raise not_traced(model, failure) from failure
    finally:
        wanted.clear()
    raise UnsupportedError(f"{type(model).__name__}.forward computes nothing that torch.compile can capture")


def trace_inputs(model: nn.Module, length: int, positions: bool = True) -> dict[str, Any]:
    """Inputs of a call of `length` tokens with T marked; with position_ids where forward may take them and `positions` says so."""
    device = only_device(model)
    inputs = plain_inputs(model, few_ids(model, length, device), positions)
    for tensor in inputs.values():
        torch._dynamo.mark_dynamic(tensor, 1)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        inputs["logits_to_keep"] = torch.tensor([0, 2, length - 1], device=device)
        torch._dynamo.mark_dynamic(inputs["logits_to_keep"], 0)
    if takes(model, "use_cache"):
        inputs["use_cache"] = False
    return inputs
