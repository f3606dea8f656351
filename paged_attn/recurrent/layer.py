"""One recurrent layer: a module that is run unchanged, with a cache that holds the states to start from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.ops.scans import Kernels
from paged_attn.attn_ops.specs.recurrent import RecurrentSpec
from paged_attn.backends.selection.scans import ScanSelection, kernels_of
from paged_attn.recurrent.cache_state import CacheTemplate
from paged_attn.recurrent.program import Program

_KEYS = [
    getattr(torch._C.DispatchKey, name)
    for name in ("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "FuncTorchBatched", "FuncTorchVmapMode")
]


@dataclasses.dataclass(frozen=True)
class Operand:
    """Where a module takes an input: a parameter of its forward, or element `at` of a tuple passed there.

    Attributes:
        form: "rows": [batch, n, ...]. "line": [n, ...], one for all requests of a batch, such as the tokens' places in a cache.
            "whole": the same for all tokens, such as decays that the model makes once for all its layers.
    """

    name: str
    at: int | None = None
    form: Literal["rows", "line", "whole"] = "rows"

    def of(self, arguments: dict[str, Any]) -> Any:
        value = arguments.get(self.name)
        return value if self.at is None or value is None else value[self.at]

    def as_rows(self, value: Tensor, tokens: int) -> Tensor:
        """[1, tokens, ...]: what one request is given."""
        return value if self.form == "rows" else value[None] if self.form == "line" else value.expand(1, tokens, *value.shape)

    def from_rows(self, rows: Tensor) -> Tensor:
        """What the module is given for rows [batch, n, ...]: the first request's, where it takes one for all of them."""
        return rows if self.form == "rows" else rows[0] if self.form == "line" else rows[0, 0]


@dataclasses.dataclass(frozen=True)
class Output:
    """One tensor [batch, n, *shape] that a module returns per token: element `at` of a tuple, or (None) the whole result."""

    at: int | None
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class RecurrentLayer:
    """A module with recurrent state, and how it is called.

    Attributes:
        module: runs by its own forward, unless it has `ops`.
        positional: names of its forward's parameters, in order.
        arguments: those of a real call with a cache; `operands` and `cache_name` are replaced in every call.
        cache_name: the parameter for the cache; "" if the state is in attributes.
        operands: its inputs, each as rows per token, [batch, n, ...]; the first are the hidden states.
        outputs: its outputs per token; several are concatenated, each flattened to [batch, n, width].
        output_length: length of the tuple that it returns.
        template: makes its caches.
        state_at: index of the new state in its result; None if the state is in the cache.
        chunks: whether it can continue a state with several tokens at once; else they are fed one by one.
        batches: whether several requests can step as one batch; else each steps separately.
        mapped: in such a batch the module sees single requests, which `torch.func.vmap` combines into one call.
        own_error: how far its forward on all tokens at once is from its forward token by token, relative to a row's length.
        unused: input tensors that it does not read.
        ops: names of the ops that replace everything that its forward does with its states; empty: its forward runs outside the graph.
        why_no_ops: why there are none, if this was tried.
        program: computes its output by ops if it calls no function that one replaces; the states in `spec` are those of the ops then.
        scans: selections for `ops`, in their order.
        why_not_in_graphs: why a captured decode step cannot hold its own forward; "" if it can; None if this was not tried.
    """

    spec: RecurrentSpec
    module: nn.Module
    positional: tuple[str, ...]
    arguments: dict[str, Any]
    operands: tuple[Operand, ...]
    cache_name: str
    outputs: tuple[Output, ...]
    output_length: int
    output_dtype: torch.dtype
    template: CacheTemplate
    state_at: int | None = None
    chunks: bool = True
    batches: bool = True
    mapped: bool = False
    own_error: float = 0.0
    unused: frozenset[str] = frozenset()
    ops: tuple[str, ...] = ()
    why_no_ops: str = ""
    program: Program | None = None
    scans: tuple[ScanSelection, ...] = ()
    why_not_in_graphs: str | None = None

    @property
    def as_written(self) -> RecurrentLayer:
        """The layer as its module computes it, with the states that this keeps."""
        return self if self.program is None else dataclasses.replace(self, spec=self.program.spec, program=None, ops=(), scans=())

    @property
    def given(self) -> list[Tensor]:
        """Its inputs in the call of `arguments`, in the order of `operands`."""
        tokens = self.operands[0].of(self.arguments).shape[1]
        return [operand.as_rows(operand.of(self.arguments), tokens) for operand in self.operands]

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of its output for one token."""
        return self.outputs[0].shape if len(self.outputs) == 1 else (sum(output.width for output in self.outputs),)

    @cached_property
    def kernels(self) -> Kernels:
        """The kernels that compute its ops in place of the functions of `attn_ops/scans/`."""
        return kernels_of(self.scans)

    @property
    def as_traced(self) -> str:
        """Everything about it that a trace of the model depends on, as text."""
        return (
            f"{self.spec} {self.ops} {self.positional} {self.operands} {sorted(self.unused)} {self.outputs} {self.output_length} "
            f"{self.output_dtype} {self.program.text if self.program else ''}"
        )

    @property
    def takes_chunks(self) -> bool:
        """Whether it can continue a state with several tokens at once."""
        return self.chunks or bool(self.ops)

    @property
    def in_graphs(self) -> bool:
        """Whether a captured decode step may contain it."""
        return bool(self.ops) or self.why_not_in_graphs == ""

    def describe(self) -> str:
        """How it runs, in words."""
        if self.ops:
            return f"by ops on the slots of its state ({', '.join(self.ops)}): all requests of a step in one call"
        prompts = "chunk by chunk" if self.chunks else "token by token after the first chunk"
        why = f" ({self.why_no_ops})" if self.why_no_ops else ""
        decoding = "one by one" if not self.batches else "mapped as one batch" if self.mapped else "as one batch"
        graphs = ", in full graphs" if self.in_graphs else f", not in full graphs ({self.why_not_in_graphs})"
        return f"by its own forward{why}: prompts {prompts}, decoding requests {decoding}{graphs * (self.why_not_in_graphs is not None)}"

    def run(self, inputs: Sequence[Tensor], states: Sequence[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """inputs [batch, n, ...] in the order of `operands`; states [batch, ...] to start from, or None at the start of a sequence.

        Returns the output [batch, n, ...] and the new states. May overwrite `states`.
        """
        cache = self.template.make(states)
        result = self._called(inputs, cache)
        after = self.template.read(cache if self.state_at is None else result[self.state_at])
        return self._rows(result), [state.to(spec.dtype) for state, spec in zip(after, self.spec.states, strict=True)]

    def step(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """`run` for one token [batch, 1, ...] of each of several requests that can step together."""
        if not self.mapped:
            return self.run(inputs, states)

        def of_request(inputs: list[Tensor], states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            output, after = self.run([value[None] for value in inputs], [state[None] for state in states])
            return output[0], [state[0] for state in after]

        result: tuple[Tensor, list[Tensor]] = mapped(of_request, list(inputs), list(states))
        return result

    def run_without_cache(self, inputs: Sequence[Tensor]) -> Tensor:
        """The output [1, T, ...] of a call as it is traced, with only `inputs`."""
        return self._rows(self._called(inputs, None))

    def _called(self, inputs: Sequence[Tensor], cache: Any) -> Any:
        arguments = dict(self.arguments)
        if self.cache_name:
            arguments[self.cache_name] = cache
        for operand, value in zip(self.operands, inputs, strict=True):
            if operand.at is None:
                arguments[operand.name] = operand.from_rows(value)
            else:
                parts = list(arguments[operand.name])
                parts[operand.at] = operand.from_rows(value)
                arguments[operand.name] = tuple(parts)
        if self.cache_name:
            return self.module(**arguments)
        return call_with_attributes(self.module, arguments, self.template.make(None) if cache is None else cache)

    def _rows(self, result: Any) -> Tensor:
        parts = [result if output.at is None else result[output.at] for output in self.outputs]
        return parts[0] if len(parts) == 1 else torch.cat([part.flatten(2) for part in parts], -1)

    def run_tokens(self, inputs: Sequence[Tensor], states: Sequence[Tensor] | None) -> tuple[list[Tensor], list[Tensor]]:
        """`run`, split into calls that the module supports: outputs to be concatenated along the tokens, and the new states."""
        if states is None or self.chunks:
            output, after = self.run(inputs, states)
            return [output], after
        outputs, now = [], list(states)
        for token in range(inputs[0].shape[1]):
            output, now = self.run([value[:, token : token + 1] for value in inputs], now)
            outputs.append(output)
        return outputs, now


def mapped(function: Callable[..., Any], *args: Any) -> Any:
    """`torch.func.vmap(function)(*args)`, also inside an op: while a step is recorded, the dispatcher would skip vmap there and run the
    op's parts on tensors that no kernel supports."""
    skipped = torch._C._dispatch_tls_local_exclude_set()
    for key in _KEYS:
        skipped = skipped.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), skipped):
        return torch.func.vmap(function)(*args)


class KeptAttributes:
    """State in plain attributes of modules, kept per request like a cache: `values` by path below the module, for its attributes and those
    of its submodules."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values


def call_with_attributes(module: nn.Module, arguments: dict[str, Any], kept: KeptAttributes) -> Any:
    """Calls a module that starts from these states; afterwards `kept` holds the new ones."""
    owners = {path: (module.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in kept.values}
    before = {path: getattr(owner, name) for path, (owner, name) in owners.items()}
    try:
        for path, (owner, name) in owners.items():
            setattr(owner, name, kept.values[path])
        result = module(**arguments)
        kept.values = {path: getattr(owner, name) for path, (owner, name) in owners.items()}
        return result
    finally:
        for path, (owner, name) in owners.items():
            setattr(owner, name, before[path])
