"""Adapters on a GPU: the kernels at published widths, and captured steps that serve adapters which come later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paged_attn import LLM, SamplingParams
from tests.engine.lora.adapters import Adapters, base
from tests.oracle import random_prompts

pytestmark = pytest.mark.usefixtures("full_float32")
if torch.cuda.is_available():
    from paged_attn.backends.lora.on_gpu import lora_on_gpu
SHAPES = [((4096, 1024, 1024), 4096), ((4096,), 4096), ((14336, 14336), 4096), ((4096,), 14336)]  # of Llama 3.1 8B


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "length"), SHAPES)
@pytest.mark.parametrize("count", [1, 7, 64, 1000])
def test_numbers(count: int, rows: tuple[int, ...], length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(count)
    rank, adapters, width = 16, 8, sum(rows)
    y, x = (torch.randn(1, count, size, device="cuda").to(dtype) for size in (width, length))
    a = (torch.randn(adapters, len(rows) * rank, length, device="cuda") * length**-0.5).to(dtype)
    b = (torch.randn(adapters, width, rank, device="cuda") * rank**-0.5).to(dtype)
    scales, slots = torch.rand(adapters, len(rows), device="cuda"), torch.randint(-1, adapters, (count,), device="cuda", dtype=torch.int32)
    expected = y[0].double()
    for slot in range(adapters):
        own = slots == slot
        inner = x[0, own].double() @ a[slot].double().T
        up = [
            scales[slot, part].double() * (inner[:, part * rank : (part + 1) * rank] @ factor.double().T)
            for part, factor in enumerate(b[slot].split(list(rows)))
        ]
        expected[own] += torch.cat(up, 1)
    result = lora_on_gpu(y, x, a, b, scales, slots, list(rows))
    assert result is not None
    error = (result[0].double() - expected).norm() / expected.norm()
    assert error <= torch.finfo(dtype).eps + 1e-5
    assert torch.equal(result[0][slots < 0], y[0][slots < 0])


def test_it_is_captured_and_replays_other_slots() -> None:
    y, x = torch.randn(1, 32, 256, device="cuda"), torch.randn(1, 32, 128, device="cuda")
    a, b, scales = torch.randn(4, 16, 128, device="cuda"), torch.randn(4, 256, 16, device="cuda"), torch.ones(4, 1, device="cuda")
    slots = torch.full((32,), -1, dtype=torch.int32, device="cuda")
    lora_on_gpu(y, x, a, b, scales, slots, [256])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = lora_on_gpu(y, x, a, b, scales, slots, [256])
    for seed in range(3):
        torch.manual_seed(seed)
        slots.copy_(torch.randint(-1, 4, (32,), dtype=torch.int32))
        graph.replay()
        assert captured is not None and torch.equal(captured, lora_on_gpu(y, x, a, b, scales, slots, [256]))


def test_every_request_of_a_mixed_batch_has_its_own(tmp_path: Path) -> None:
    adapters = Adapters(tmp_path, "llama", {"a": {}, "b": {"r": 7, "targets": ["k_proj", "up_proj", "down_proj"]}})
    prompts, which = random_prompts((5, 17, 33, 9, 12, 1)), [None, "a", "b", "a", None, "b"]
    with LLM(base().cuda(), max_loras=2, page_size=16, num_pages=200, max_batch_tokens=64) as llm:
        for name, folder in adapters.folders.items():
            llm.load_lora(name, folder)
        completions = llm.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True), lora=which)
        assert [completion.token_ids for completion in completions] == adapters.expected(prompts, which)
        assert (
            llm.engine.lora_step_runner is not None
            and llm.engine.lora_step_runner.graphs is not None
            and llm.engine.lora_step_runner.graphs.captured
        )
