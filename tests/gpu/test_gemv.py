"""The product with a single row on a GPU: its numbers, that it waits for what it reads, and engines whose lone requests run in one row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.ops.linears.linear import LINEAR, ONE_ROW_KERNEL
from tests.gpu.captured_chain import check_replays
from tests.oracle import greedy, random_prompts
from tests.tiny_models import build

pytestmark = pytest.mark.usefixtures("full_float32")
if torch.cuda.is_available():
    from paged_attn.backends.linear.gemv import fits, one_row_linear

    ONE_ROW_KERNEL.use(one_row_linear)  # as engines do
SHAPES = [
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (128256, 4096),
    (96, 48),
    (1000, 1000),
    (7, 16384),
    (5120, 2880),
    (2304, 11008),
    (3584, 18944),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("count", "length"), SHAPES)
def test_numbers(dtype: torch.dtype, count: int, length: int) -> None:
    torch.manual_seed(count + length)
    x, weight = torch.randn(1, 1, length, device="cuda").to(dtype), (torch.randn(count, length, device="cuda") * 0.02).to(dtype)
    bias = torch.randn(count, device="cuda").to(dtype)
    for given in (None, bias):
        expected = F.linear(x.double(), weight.double(), None if given is None else given.double())
        result = LINEAR(x, weight, given)
        alone = one_row_linear(x, weight, given)
        assert (alone is not None) == fits(x, weight)
        if alone is not None:
            assert torch.equal(result, alone), "another kernel computed it"
        error = (result.double() - expected).abs().max() / expected.abs().max()
        assert error <= torch.finfo(dtype).eps + 1e-6


@pytest.mark.parametrize("length", [1024, 2880, 4096])
def test_a_captured_chain_reads_what_the_kernels_before_it_wrote(length: int) -> None:
    """Each product starts early, behind long kernels and behind other products, and x is different in each replay."""
    weights = [torch.randn(length, length, device="cuda", dtype=torch.bfloat16) * length**-0.5 for _ in range(6)]
    x, wide = torch.zeros(1, length, device="cuda", dtype=torch.bfloat16), torch.zeros(4096, length, device="cuda", dtype=torch.bfloat16)

    def chain() -> torch.Tensor:
        wide.copy_(x.expand_as(wide) + 1)  # long
        row = wide[-1:] - 1
        for i, weight in enumerate(weights):
            row = LINEAR(row, weight, None)
            if i % 2:
                wide.copy_(row.expand_as(wide))
                row = wide[-1:].tanh()
        return row

    check_replays(chain, x)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_neox", "mixtral", "deepseek_v3", "qwen2"])
@pytest.mark.parametrize("inductor", [False, True])
def test_a_lone_request_runs_in_one_row(name: str, inductor: bool) -> None:
    model = build(name).cuda()
    prompts = random_prompts((5, 33))
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    with LLM(model, inductor=inductor, max_batch_tokens=32, max_requests=4, num_pages=64, graph_strict=True) as llm:
        assert 1 in llm.engine.step_runner.report().full.sizes
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert [c.token_ids for c in llm.generate([prompt], SamplingParams(max_new_tokens=12))] == [tokens]
        assert [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=12))] == expected
