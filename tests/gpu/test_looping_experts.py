"""Blocks that loop over a list of experts on a GPU: inside captured graphs, without a second copy of their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.ops.module import MODULE
from tests.engine.tracing.looping import blocks
from tests.oracle import random_prompts

pytestmark = pytest.mark.usefixtures("full_float32")
PROMPTS = random_prompts((1, 5, 17, 33))


def greedy(model: blocks.Model, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            rows = torch.arange(len(ids), device="cuda")[None]
            ids.append(int(model(torch.tensor([ids], device="cuda"), rows)[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", ["OneHotLoop", "MaskedLoop", "SharedExpert", "Sorted", "CalledList", "ByHits", "OneExpert"])
def test_tokens_in_float32_by_triton_in_captured_graphs(kind: str) -> None:
    model: Any = blocks.Model(getattr(blocks, kind)).eval().cuda()
    expected = [greedy(model, prompt, 8) for prompt in PROMPTS]
    with LLM(model, num_pages=64, max_batch_tokens=16) as llm:
        nodes = [node for node in llm.engine.runner.compiled.rewrite.gm.graph.nodes if node.target in (EXPERTS, MODULE)]
        assert [node.args[-1] for node in nodes] == ["triton"] * 2
        got = llm.generate(PROMPTS, SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert [completion.token_ids for completion in got] == expected


def test_weights_are_not_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of 256 MiB: an engine with few pages and graphs leaves far less than another copy of them."""
    for name, size in (("HIDDEN", 1024), ("INNER", 1024), ("EXPERTS", 16)):
        monkeypatch.setattr(blocks, name, size)
    model: Any = blocks.Model(lambda: blocks.SharedExpert(lambda: blocks.Gated(inner=1344))).eval().cuda().bfloat16()
    torch.cuda.empty_cache()
    before, weights = torch.cuda.memory_allocated(), sum(p.nbytes for block in model.blocks for p in block.experts.parameters())
    with LLM(model, num_pages=16, max_batch_tokens=16) as llm:
        assert sum(llm.engine.runner.compiled.rewrite.experts.values()) == 2
        llm.generate(PROMPTS[:2], SamplingParams(max_new_tokens=4, ignore_eos=True))
        assert torch.cuda.memory_allocated() - before < weights / 2
