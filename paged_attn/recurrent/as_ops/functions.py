"""Functions that layers with recurrent state call by a name of their module, and the ops that compute the same on slots of a pool.

Called without a cache, as a model is traced, a layer gives them all tokens of a call and no state. An op in a function's place takes the
state from the forward context instead, for every request of a batch that is one row of tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.ops.scans import GATED_DELTA_RULE, KDA, MAMBA1_SCAN, MAMBA2_SCAN, SHORT_CONV
from paged_attn.recurrent.program import NoOpFits

_ACTIVATIONS = {None: "", "silu": "silu", "swish": "silu"}


@dataclass
class _Running:
    """The layer whose forward is running: its id (-1: none), the shapes of its states, and state index -> op that has taken the state."""

    layer_id: int = -1
    shapes: Sequence[tuple[int, ...]] = ()
    ops: dict[int, str] = field(default_factory=dict)

    def take(self, op: str, fits: Callable[[tuple[int, ...]], bool]) -> int:
        """The first state with a fitting shape that no other op of the layer has taken."""
        for index, shape in enumerate(self.shapes):
            if index not in self.ops and fits(shape):
                self.ops = {**self.ops, index: op}
                return index
        raise NoOpFits(f"none of its states has the shape that {op} needs")


_running = _Running()
_one_at_a_time = threading.Lock()
_replaced: dict[tuple[int, str], tuple[int, Callable[..., Any]]] = {}  # by (globals id, name): number of users, the original function
_proving: set[int] = set()  # threads inside `layer_of_ops`; other threads may run the same model meanwhile


@contextmanager
def layer_of_ops(shapes: Sequence[tuple[int, ...]]) -> Iterator[None]:
    """Inside, the functions of `replaced_functions` are ops of a single layer, also when called without torch.compile."""
    with _one_at_a_time:
        enter_layer(0, shapes)
        _proving.add(threading.get_ident())
        try:
            yield
        finally:
            _proving.discard(threading.get_ident())
            leave_layer()


def enter_layer(layer_id: int, shapes: Sequence[tuple[int, ...]]) -> None:
    _running.layer_id, _running.shapes, _running.ops = layer_id, shapes, {}


def leave_layer() -> None:
    _running.layer_id, _running.shapes = -1, ()


def ops_that_ran() -> dict[int, str]:
    """State index -> name of the op that took the state, for the last layer, in the order of the ops."""
    return _running.ops


@contextmanager
def replaced_functions(scopes: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Inside, known names in these modules' globals are ops while a layer runs that `enter_layer` named; otherwise they are unchanged.

    Several such contexts may overlap and end in any order: the last one restores the functions.
    """
    found = [(scope, name) for scope in scopes for name in FUNCTIONS.keys() & scope.keys()]
    for scope, name in found:
        uses, original = _replaced.get((id(scope), name), (0, scope[name]))
        if not uses:
            scope[name] = _op_or_original(FUNCTIONS[name], original)
        _replaced[id(scope), name] = uses + 1, original
    try:
        yield
    finally:
        for scope, name in found:
            uses, original = _replaced.pop((id(scope), name))
            if uses > 1:
                _replaced[id(scope), name] = uses - 1, original
            else:
                scope[name] = original


def _op_or_original(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        here = _running.layer_id >= 0 and (torch.compiler.is_compiling() or threading.get_ident() in _proving)
        return function(*args, **kwargs) if here else original(*args, **kwargs)

    return call


def _short_conv(hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **more: Any) -> Tensor:
    """[1, C, T] -> [1, C, T]"""
    _one_row_of_tokens(hidden_states, more)
    if activation not in _ACTIVATIONS:
        raise NoOpFits(f"its convolution has the activation {activation}; known are none and silu")
    channels, taps = weight.shape
    state = _running.take("short_conv", lambda shape: len(shape) == 2 and shape[0] == channels and shape[1] >= taps - 1)
    x = hidden_states[0].transpose(0, 1)
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    SHORT_CONV(x, weight, bias, output, _ACTIVATIONS[activation], [], _running.layer_id, state)
    return output.transpose(0, 1)[None]


def _delta_rule(op: Callable[..., Any], name: str) -> Callable[..., tuple[Tensor, None]]:
    def call(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64, initial_state: Tensor | None = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, **more: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """query, key [1, T, key heads, K], value [1, T, H, V], g [1, T, H] (of kda [1, T, H, K]), beta [1, T, H] -> [1, T, H, V]"""
        _one_row_of_tokens(query, more, initial_state, output_final_state)
        wanted = (value.shape[2], key.shape[3], value.shape[3])
        state = _running.take(name, lambda shape: shape == wanted)
        output = torch.empty_like(value[0], dtype=query.dtype, memory_format=torch.contiguous_format)
        op(query[0], key[0], value[0], g[0], beta[0], output, use_qk_l2norm_in_kernel, _running.layer_id, state)
        return output[None], None

    return call


def _mamba2_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    dt_bias: Tensor | None = None, initial_states: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False, z: Tensor | None = None, **more: Any,
) -> Tensor:  # fmt: skip
    """hidden_states [1, T, H, P], dt [1, T, H], A [H], B, C [1, T, groups, N], D, dt_bias [H] -> float32 [1, T, H, P]"""
    _one_row_of_tokens(hidden_states, more, initial_states, return_final_states)
    if z is not None:
        raise NoOpFits("its scan has a gate")
    wanted = (hidden_states.shape[2], hidden_states.shape[3], B.shape[3])
    state = _running.take("mamba2_scan", lambda shape: shape == wanted)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    output = torch.empty_like(hidden_states[0], dtype=torch.float32, memory_format=torch.contiguous_format)
    MAMBA2_SCAN(hidden_states[0], dt[0], A, B[0], C[0], output, float(dt_limit[0]), float(dt_limit[1]), _running.layer_id, state)
    if D is not None:
        output = output + hidden_states[0].float() * D[:, None]
    return output[None]


def _mamba1_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    delta_bias: Tensor | None = None, delta_softplus: bool = False, return_last_state: bool = False, **more: Any,
) -> Tensor:  # fmt: skip
    """hidden_states, dt, z [1, channels, T], A [channels, N], B, C [1, N, T], D, delta_bias [channels] -> float32 [1, channels, T]"""
    _one_row_of_tokens(hidden_states, more, final=return_last_state)
    wanted = tuple(A.shape)
    state = _running.take("mamba1_scan", lambda shape: shape == wanted)
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    x = hidden_states[0].transpose(0, 1)
    output = torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    MAMBA1_SCAN(x, dt[0].transpose(0, 1), A, B[0].transpose(0, 1), C[0].transpose(0, 1), output, _running.layer_id, state)
    result = output.transpose(0, 1)[None]
    if D is not None:
        result = result + hidden_states * D[:, None]
    return result if z is None else result * F.silu(z)


def _one_row_of_tokens(given: Tensor, more: dict[str, Any], initial: Tensor | None = None, final: bool = False) -> None:
    if given.shape[0] != 1 or initial is not None or final or more.get("cu_seqlens") is not None or more.get("seq_idx") is not None:
        raise NoOpFits("without a cache it calls its functions with states or several sequences")


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _short_conv,
    "torch_chunk_gated_delta_rule": _delta_rule(GATED_DELTA_RULE, "gated_delta_rule"),
    "chunk_kimi_delta_attention": _delta_rule(KDA, "kda"),
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba_selective_scan": _mamba1_scan,
}
