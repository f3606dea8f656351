"""Layers of experts of published widths on a GPU, and what every backend of theirs must do: the float32 reference's numbers, inside
captured graphs too, without waiting."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from paged_attn.attn_ops.specs.experts import ExpertsSpec, Gating
from paged_attn.backends.experts.base import ExpertsProblem
from paged_attn.backends.selection.experts import experts_backend, reasons_against
from tests.backends.experts.operands import close, in_float32
from tests.gpu.test_no_sync import waiting_is_an_error

TOKENS = (1, 8, 64, 1024)
TOLERANCE = 0.01  # of bf16, beside float32


class Shape(NamedTuple):
    experts: int
    top_k: int
    hidden: int
    inner: int
    gating: Gating = Gating()
    has_bias: bool = False
    is_transposed: bool = False


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "deepseek-v2-lite": Shape(64, 6, 2048, 1408),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, Gating("silu", True, True, 7.0, 1.702), True, True),
}


class Layer(NamedTuple):
    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None
    gating: Gating

    @property
    def problem(self) -> ExpertsProblem:
        spec = ExpertsSpec(len(self.w1), self.w2.shape[1], self.w2.shape[2], self.gating, self.b1 is not None)
        return ExpertsProblem.of(spec, self.w1, self.w2)


def up_first(shape: Shape) -> Shape:
    """In rows, all of up before all of gate: what FlashInfer takes."""
    return shape._replace(gating=replace(shape.gating, interleaved=False, up_first=True), is_transposed=False)


@cache
def layer_of(shape: Shape) -> Layer:
    """Random weights in bf16; one layer of a shape for all tests."""
    numbers = torch.Generator("cuda").manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=numbers, device="cuda", dtype=torch.bfloat16)

    def weight(rows: int, columns: int) -> Tensor:
        size = (columns, rows) if shape.is_transposed else (rows, columns)
        made = random(shape.experts, *size).mul_(columns**-0.5)
        return made.transpose(1, 2) if shape.is_transposed else made

    rows = shape.inner * (1 + shape.gating.gated)
    biases = (random(shape.experts, rows), random(shape.experts, shape.hidden)) if shape.has_bias else (None, None)
    return Layer(weight(rows, shape.hidden), weight(shape.hidden, shape.inner), *biases, shape.gating)


def tokens_of(shape: Shape, count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, ids and weights; of four tokens or more, some ids are no expert's, and one expert gets nothing."""
    numbers = torch.Generator("cuda").manual_seed(1000 * seed + count)
    x = torch.randn(count, shape.hidden, generator=numbers, device="cuda", dtype=torch.bfloat16)
    scores = torch.rand(count, shape.experts - 1, generator=numbers, device="cuda")
    weights, ids = scores.topk(shape.top_k, dim=1)
    if count >= 4:
        ids[1], ids[2, 0] = shape.experts, shape.experts + 3
    return x, ids, (weights / weights.sum(1, keepdim=True)).to(torch.bfloat16)


def reference(shape: Shape, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return in_float32((x, ids, weights, *layer_of(shape)))


def reasons(name: str, shape: Shape) -> list[str]:
    return reasons_against(name, layer_of(shape).problem)


def check_numbers(name: str, shape: Shape, count: int) -> None:
    given = tokens_of(shape, count)
    result = experts_backend(name).forward(*given, *layer_of(shape))
    assert result.dtype == torch.bfloat16 and close(result, reference(shape, *given), TOLERANCE)
    assert count < 4 or not result[1].any()


def check_captured(name: str, shape: Shape, count: int) -> None:
    """A replay computes what lies in the graph's tensors then, also after products of other sizes, and nothing in it waits."""
    backend, layer = experts_backend(name), layer_of(shape)
    held = tokens_of(shape, count)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backend.forward(*held, *layer)  # compiles
        with waiting_is_an_error():
            backend.forward(*held, *layer)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = backend.forward(*held, *layer)
    backend.forward(*tokens_of(shape, 2048), *layer)
    later = tokens_of(shape, count, seed=1)
    for tensor, value in zip(held, later, strict=True):
        tensor.copy_(value)
    graph.replay()
    assert close(output, reference(shape, *later), TOLERANCE)
