"""Dual chunk attention on a GPU by the Triton backend: the formula in every kind of step, and a model's own logits, graphs and all."""

from __future__ import annotations

import copy

import pytest
import torch

from paged_attn import LLM
from paged_attn.attn_ops.specs.dual_chunk import DualChunkSpec
from tests.backends.dual_chunk_problems import case_of, spec_of
from tests.backends.fitting import instance
from tests.engine.model.dual_chunk_code import made
from tests.gpu.test_no_sync import waiting_is_an_error
from tests.oracle import random_prompts
from tests.teacher_forced import by_engine, by_model

# Within a chunk of 256, at its borders, over many; steps of few queries and of tiles of them.
STEPS = {
    "decode": ((70, 1), (255, 1), (256, 1), (511, 1), (2000, 1)),
    "prompts": ((0, 700), (0, 256), (0, 257), (0, 1)),
    "mixed": ((300, 1), (0, 90), (1000, 400), (255, 2), (700, 33)),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SIZES = {"128": {"qk_head_dim": 128, "v_head_dim": 128, "scale": 0.1}, "odd": {"qk_head_dim": 80, "v_head_dim": 48, "scale": 0.1}}


@pytest.mark.usefixtures("full_float32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["stream-k", "deterministic"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("step", STEPS)
def test_every_step(step: str, sizes: str, deterministic: bool, dtype: torch.dtype) -> None:
    spec = spec_of(256, num_q_heads=8, num_kv_heads=2, **SIZES[sizes])
    case = case_of(STEPS[step], spec, page_size=16, dtype=dtype, extra_rows=3).to("cuda")
    case.assert_right(instance("triton", deterministic=deterministic), TOLERANCE[dtype])


@pytest.mark.parametrize("step", STEPS)
def test_a_step_never_waits(step: str) -> None:
    """After a first one, which compiles."""
    case = case_of(STEPS[step], spec_of(256, qk_head_dim=64, v_head_dim=64), page_size=16, dtype=torch.bfloat16).to("cuda")
    case.run(instance("triton"))
    with waiting_is_an_error():
        case.run(instance("triton"))


@pytest.mark.parametrize("graphs", ["off", "full"])
def test_logits_of_an_engine(graphs: str) -> None:
    """A tiny model in bfloat16, prompts in chunks and decode steps, against itself in float32."""
    model = made("masked", 24, 8).to(torch.bfloat16).cuda()
    prompts = random_prompts((5, 27, 49, 130))
    expected = by_model(copy.deepcopy(model).float(), prompts, 4)
    with LLM(model, backend="triton", graphs=graphs, page_size=16, num_pages=64, inductor=False) as llm:
        assert all(isinstance(spec, DualChunkSpec) for spec in llm.engine.runner.layers)
        assert llm.engine.step_runner.graphs is None or llm.engine.step_runner.report().full
        found = by_engine(llm.engine, prompts, 4)
    for got, true in zip(found, expected, strict=True):
        assert (got - true).abs().max() <= 0.08 * true.abs().max()
