"""Routers' products on a GPU: tensors in 16 bits with a result in float32, as exact as a float32 product of casts; captured; in engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.ops.linears.linear import LINEAR_FLOAT32, ONE_ROW_KERNEL
from tests.oracle import greedy, random_prompts
from tests.tiny_models import build

pytestmark = pytest.mark.usefixtures("full_float32")
if torch.cuda.is_available():
    from paged_attn.backends.linear.gemv import one_row_linear

    ONE_ROW_KERNEL.use(one_row_linear)  # as engines do
SHAPES = [(64, 2048), (256, 7168), (128, 4096), (7, 100), (33, 4097)]
ROWS = (1, 2, 8, 33, 512)


def tensors(rows: int, outputs: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    numbers = torch.Generator("cuda").manual_seed(rows + outputs + length)
    x, weight = (torch.randn(n, length, device="cuda", generator=numbers) for n in (rows, outputs))
    return x.to(dtype), (weight * length**-0.5).to(dtype), torch.randn(outputs, device="cuda", generator=numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "length"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_sums_are_as_exact_as_those_of_casts(rows: int, outputs: int, length: int, dtype: torch.dtype) -> None:
    x, weight, bias = tensors(rows, outputs, length, dtype)
    for given in (None, bias):
        expected = F.linear(x.double(), weight.double(), None if given is None else given.double())
        got = LINEAR_FLOAT32(x, weight, given)
        assert got.dtype == torch.float32 and got.shape == expected.shape
        # Tensor cores cut off instead of rounding; sums that were rounded to 16 bits on the way are off by ten times this at least.
        assert (got.double() - expected).abs().max() <= 3e-5 * expected.abs().max()
        torch.testing.assert_close(LINEAR_FLOAT32(x.unsqueeze(0), weight, given), got.unsqueeze(0), rtol=0, atol=0)


@pytest.mark.parametrize("rows", ROWS)
def test_whole_numbers_are_exact(rows: int) -> None:
    """The pass takes that for granted: what it tries are whole numbers, whose sums depend on no order."""
    numbers = torch.Generator().manual_seed(rows)
    x, weight = (torch.randint(1, 9, (n, 7168), generator=numbers).cuda() for n in (rows, 64))
    expected = F.linear(x.double(), weight.double()).float()
    assert torch.equal(LINEAR_FLOAT32(x.bfloat16(), weight.bfloat16(), None), expected)


def test_where_sums_in_16_bits_are_asked_for_the_models_own_product_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = tensors(8, 64, 2048, torch.float16)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", True)
    assert torch.equal(LINEAR_FLOAT32(x, weight, None), F.linear(x.float(), weight.float()))


@pytest.mark.parametrize("rows", [1, 8])
def test_captured_it_waits_for_what_it_reads(rows: int) -> None:
    _, weight, bias = tensors(rows, 256, 7168, torch.bfloat16)
    x = torch.zeros(rows, 7168, device="cuda", dtype=torch.bfloat16)
    wide = torch.zeros(4096, rows, 7168, device="cuda", dtype=torch.bfloat16)

    def step() -> Tensor:
        wide.copy_(x.expand_as(wide))  # long
        return LINEAR_FLOAT32(wide[-1], weight, bias) * 2

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in range(20):
        x.copy_(tensors(rows, seed + 1, 7168, torch.bfloat16)[0])
        expected = step().clone()
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected), seed


def in_bf16(name: str) -> Any:
    """transformers 5.24 keeps the routers' weights in float32; those that were moved, or come from remote code, are in bf16."""
    model = build(name, dtype=torch.bfloat16).cuda()
    for module in model.modules():
        if type(module).__name__.endswith(("TopkRouter", "TopKRouter")):
            module.weight.data = module.weight.data.bfloat16()
    return model


@pytest.mark.parametrize("inductor", [False, True])
def test_engines_give_the_models_tokens_in_full_graphs(inductor: bool) -> None:
    model = in_bf16("deepseek_v3")
    prompts = random_prompts((5, 33))
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    settings: dict[str, Any] = {"inductor": inductor, "max_batch_tokens": 32, "max_requests": 4, "num_pages": 64, "graph_strict": True}
    with LLM(model, **settings) as llm:
        found = llm.engine.runner.compiled.rewrite  # type: ignore[attr-defined]
        assert found.counts["linear_float32"] == found.counts["routing"] == 2
        assert 1 in llm.engine.step_runner.report().full.sizes
        got = [c.token_ids for c in llm.generate(prompts, params)]
        assert [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    with LLM(model, disable_passes=("linear_float32",), **settings) as llm:
        assert llm.engine.runner.compiled.rewrite.counts["linear_float32"] == 0  # type: ignore[attr-defined]
        beside = [c.token_ids for c in llm.generate(prompts, params)]
    # In bf16 attention of ours rounds otherwise than the model's: the same engine without the pass is the measure, and the first token of
    # each prompt the model's own. Inductor leaves out the rounding before a cast to float32, and so other numbers come to the router there.
    assert got == beside or (inductor and all(part_at_a_tie(model, *both) for both in zip(prompts, got, beside, strict=True)))
    assert [tokens[0] for tokens in got] == [greedy(model, prompt, 1)[0] for prompt in prompts]


def part_at_a_tie(model: Any, prompt: list[int], one: list[int], other: list[int]) -> bool:
    """Whether the model's own logits of the first tokens in which they differ are closer than bf16 keeps them apart."""
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
    if same is None:
        return True
    with torch.no_grad():
        logits = model(torch.tensor([prompt + one[:same]], device="cuda")).logits[0, -1].float()
    apart = (logits[one[same]] - logits[other[same]]).abs() / logits.abs().max()
    return bool(apart < 4 * torch.finfo(torch.bfloat16).eps)
