"""The ops on slots of state: they write their output alone, split graphs, may be in full ones, and refuse what they cannot know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.kv.state_pool import StatePool
from paged_attn.attn_ops.ops.kinds import KINDS
from paged_attn.attn_ops.ops.scans import CHANNEL_SCAN, GATED_DELTA_RULE, KDA, LINEAR_ATTENTION, MAMBA1_SCAN, MAMBA2_SCAN, SHORT_CONV
from paged_attn.attn_ops.specs.recurrent import RecurrentSpec, StateSpec
from paged_attn.backends.attention.torch_native import TorchNativeBackend
from paged_attn.recurrent.run import RecurrentRunner
from tests.attn_ops.scans.problems import RECURRENCES

OPS = {
    "short_conv": SHORT_CONV, "gated_delta_rule": GATED_DELTA_RULE, "kda": KDA, "linear_attention": LINEAR_ATTENTION,
    "mamba2_scan": MAMBA2_SCAN, "mamba1_scan": MAMBA1_SCAN, "channel_scan": CHANNEL_SCAN,
}  # fmt: skip
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


class Truth:
    """Of a layer what the ops ask it for."""

    kernels: dict[Any, Any] = {}


def context(name: str, states: bool = True) -> ForwardContext:
    """A request of three first tokens and one that decodes, in a batch of four rows."""
    batch = Batch.build([BatchRequest([1, 2, 3], [1], state_slot=1), BatchRequest([4], [2], 2, state_slot=2)], 4)
    pool = StatePool([RecurrentSpec("mixer", (StateSpec("state", RECURRENCES[name].state, torch.float32),))], 3)
    return ForwardContext(
        batch, KVPool([], 4, 4, torch.float32), TorchNativeBackend(), RecurrentRunner([Truth()], pool) if states else None
    )


def arguments(name: str, rows: int = 4) -> list[Any]:
    kind = RECURRENCES[name]
    return [*kind.given(rows), torch.zeros(rows, *kind.output), *kind.options, *kind.limits, 0, 0]


@pytest.mark.parametrize("name", OPS)
def test_the_op_writes_its_output_alone(name: str) -> None:
    op: OpOverload = OPS[name]
    (kind,) = (kind for kind in KINDS if kind.op is op)
    assert (kind.splits, kind.in_full_graphs, kind.on_disk) == (True, True, True)
    written = [each.name for each in op._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    assert written == ["output"] and not op._schema.returns
    given = arguments(name)
    with context(name):
        assert torch.library.opcheck(op, given) == dict.fromkeys(UTILITIES, "SUCCESS")
    op(*[each.to("meta") if isinstance(each, Tensor) else each for each in given])


@pytest.mark.parametrize("name", OPS)
def test_a_mixed_batch(name: str) -> None:
    torch.manual_seed(0)
    kind, given = RECURRENCES[name], arguments(name)
    with context(name) as step:
        assert step.recurrent is not None
        states = step.recurrent.state(0, 0)
        states.normal_()
        before = states.clone()
        OPS[name](*given)
    output = given[len(kind.per_row)]
    tensors = given[: len(kind.per_row)]
    for rows, state, slot in ((range(3), torch.zeros(kind.state), 1), ([3], before[2], 2)):
        expected, after = kind.expected(tensors, state, rows, decodes=slot == 2)
        torch.testing.assert_close(output[list(rows)].double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[slot].double(), after, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OPS)
def test_refusals(name: str) -> None:
    with pytest.raises(ContextError, match=rf"{name} of recurrent layer 0 was called outside any .*; run the model through"):
        OPS[name](*arguments(name))
    with context(name, states=False), pytest.raises(ContextError, match="in a forward context without recurrent state"):
        OPS[name](*arguments(name))
    with context(name), pytest.raises(ContextError, match=rf"{name} .* got 3 rows .* batch has 4; .*model_inputs"):
        OPS[name](*arguments(name, 3))
