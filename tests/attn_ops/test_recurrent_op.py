"""The recurrent op: schema, opcheck, refusals, and that it is a split point."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.recurrent import RECURRENT_LAYER
from paged_attn.backends.attention.torch_native import TorchNativeBackend
from paged_attn.capture.split.split_ops import split_ops

UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


class Sum:
    """A stand-in for the runner: the output is the sum of the inputs plus the plan plus the layer's id."""

    def plan(self, batch: Batch) -> Any:
        return 100.0 * batch.num_requests

    def forward(self, plan: Any, layer_id: int, inputs: Sequence[Tensor], output: Tensor) -> None:
        output.copy_(sum(inputs) + plan + layer_id)


def context(recurrent: Any = None) -> ForwardContext:
    batch = Batch.build([BatchRequest([1, 2, 3], [1], state_slot=1), BatchRequest([4], [2], state_slot=2)], 4)
    return ForwardContext(batch, KVPool([], 4, 4, torch.float32), TorchNativeBackend(), recurrent)


def tensors(rows: int = 4, inputs: int = 2) -> tuple[list[Tensor], Tensor]:
    return [torch.randn(1, rows, 6) for _ in range(inputs)], torch.zeros(1, rows, 6)


def test_schema_mutates_output_alone():
    schema = RECURRENT_LAYER._schema
    assert str(schema) == "paged_attn::recurrent_layer_with_output(Tensor[] inputs, Tensor(a!) output, int layer_id) -> ()"
    assert RECURRENT_LAYER is torch.ops.paged_attn.recurrent_layer_with_output.default
    assert RECURRENT_LAYER in split_ops()


@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(inputs, grad):
    given, output = tensors(inputs=inputs)
    with context(Sum()):
        results = torch.library.opcheck(RECURRENT_LAYER, ([t.requires_grad_(grad) for t in given], output, 3))
    assert results == dict.fromkeys(UTILITIES, "SUCCESS")


def test_it_runs_the_contexts_layer_with_the_contexts_plan():
    given, output = tensors()
    with context(Sum()):
        RECURRENT_LAYER(given, output, 7)
    torch.testing.assert_close(output, given[0] + given[1] + 207)


def test_outside_any_context():
    with pytest.raises(ContextError, match=r"outside any forward context; run the model through paged_attn\.LLM"):
        RECURRENT_LAYER(*tensors(), 0)


def test_a_context_without_recurrent_state():
    with context(), pytest.raises(ContextError, match="recurrent layer 5 was called in a forward context without recurrent state"):
        RECURRENT_LAYER(*tensors(), 5)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_the_wrong_number_of_rows(rows):
    with context(Sum()), pytest.raises(ContextError, match=rf"layer 2 got {rows} rows .* batch has 4; .*model_inputs"):
        RECURRENT_LAYER(*tensors(rows), 2)


def test_on_meta_tensors_it_does_nothing():
    RECURRENT_LAYER([torch.empty(1, 4, 6, device="meta")], torch.empty(1, 4, 6, device="meta"), 0)
