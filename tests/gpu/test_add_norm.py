"""A residual addition and a norm on a GPU, alone and within a product with one row: numbers, order in a captured chain, 16-bit engines."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.ops.linears.add_norm import ADD_NORM, ADD_NORM_KERNEL, ADD_NORM_LINEAR, ADD_NORM_LINEAR_KERNEL, rms_norm
from paged_attn.attn_ops.ops.linears.linear import ONE_ROW_KERNEL
from tests.gpu.captured_chain import check_replays
from tests.oracle import random_prompts
from tests.tiny_models import build

pytestmark = pytest.mark.usefixtures("full_float32")
if torch.cuda.is_available():
    from paged_attn.backends.linear.add_norm import add_norm, add_norm_linear
    from paged_attn.backends.linear.gemv import one_row_linear

    for kernel, use in ((ONE_ROW_KERNEL, one_row_linear), (ADD_NORM_KERNEL, add_norm), (ADD_NORM_LINEAR_KERNEL, add_norm_linear)):
        kernel.use(use)  # as engines do
EPS = 1e-5


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def off(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).abs().max() / expected.abs().max() / torch.finfo(got.dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "length"), [(1, 4096), (2, 2880), (33, 2048), (300, 5120), (5, 8192), (3, 18432)])
def test_norm(dtype: torch.dtype, rows: int, length: int) -> None:
    torch.manual_seed(rows + length)
    x, residual, scale = numbers(1, rows, length, dtype=dtype), numbers(1, rows, length, dtype=dtype), numbers(length, dtype=dtype)
    normed, total = ADD_NORM(x, residual, scale, EPS, 1.0)
    assert torch.equal(total, x + residual)
    assert off(normed, rms_norm(total.double(), scale.double(), EPS, 1.0)) <= 1


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    ("count", "length"), [(128, 2048), (32, 2880), (5120, 2048), (6144, 4096), (5120, 2880), (28672, 4096), (512, 2048)]
)
def test_product(count: int, length: int, keep: bool) -> None:
    """Within the product, or, where that does not gain, before it: the numbers of the norm alone and the product behind it."""
    torch.manual_seed(count + length)
    x, residual, scale, weight, bias = numbers(1, 1, length), numbers(1, 1, length), numbers(length), numbers(count, length), numbers(count)
    out, normed, total = ADD_NORM_LINEAR(x, residual, scale, EPS, 0.0, weight, bias, keep)
    alone, same = ADD_NORM(x, residual, scale, EPS, 0.0)
    assert torch.equal(total, same) and torch.equal(total, x + residual)
    assert off(normed, alone.double()) <= 1 if keep else normed.numel() == 0
    assert off(out, F.linear(alone.double(), weight.double(), bias.double())) <= 1.1


@pytest.mark.parametrize("length", [2048, 4096])
def test_a_captured_chain_reads_what_the_kernels_before_it_wrote(length: int) -> None:
    """Each starts early, behind long kernels and behind other products, and x is different in each replay."""
    weights = [numbers(length, length) * length**-0.5 for _ in range(6)]
    scale = numbers(length).abs()
    x, wide = torch.zeros(1, length, device="cuda", dtype=torch.bfloat16), torch.zeros(4096, length, device="cuda", dtype=torch.bfloat16)

    def chain() -> Tensor:
        wide.copy_(x.expand_as(wide) + 1)  # long
        row = total = wide[-1:] - 1
        for i, weight in enumerate(weights):
            row, normed, total = ADD_NORM_LINEAR(row, total, scale, EPS, 0.0, weight, None, i % 3 == 0)
            if i % 2:
                wide.copy_((normed if i % 3 == 0 else row).expand_as(wide))
                row = wide[-1:].tanh()
        return row + total

    check_replays(chain, x)


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_moe"])
def test_a_lone_request_in_16_bits_runs_in_one_row(name: str) -> None:
    """Its routers choose as they do in two rows, or the check would leave two rows."""
    model = build(name, dtype=torch.bfloat16, hidden_size=256, head_dim=64).cuda()
    with LLM(model, max_batch_tokens=32, max_requests=4, num_pages=64, graph_strict=True) as llm:
        assert llm.engine.runner.compiled.rewrite.counts["add_norm"] == 6
        assert 1 in llm.engine.step_runner.report().full.sizes
        (completion,) = llm.generate(random_prompts((9,)), SamplingParams(max_new_tokens=12))
        assert len(completion.token_ids) == 12
