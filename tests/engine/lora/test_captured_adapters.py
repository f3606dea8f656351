"""Steps with adapters are recorded beside those without: who is loaded later is served by the graphs that were made before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paged_attn import SamplingParams
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.engine import Engine
from paged_attn.engine.steps import one_row_check
from tests.capture.tape import TapeRecorder
from tests.engine.lora.adapters import Adapters, base
from tests.engine.models import assert_idle, run_all
from tests.engine.steps.test_captured_steps import fixed_backend
from tests.oracle import random_prompts

PROMPTS = random_prompts((1, 5, 17, 30, 9, 4))
GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_adapters_that_come_after_the_capture(overlap: bool, tmp_path: Path) -> None:
    adapters = Adapters(tmp_path, "llama", {"a": {}, "b": {"r": 2, "targets": ["k_proj", "up_proj"]}})
    config = EngineConfig(
        page_size=4, num_pages=128, max_requests=6, max_batch_tokens=24, graph_decode_sizes=3, graph_extend_sizes=3, max_loras=2,
        overlap=overlap, merge_linears=True,
    )  # fmt: skip
    with fixed_backend():
        engine = Engine(base(), config=config, recorder=TapeRecorder())
    assert engine.lora_step_runner is not None and engine.adapters is not None
    addresses = [tensor.data_ptr() for tensor in engine.adapters.tensors]
    ran = {name: _ran(steps) for name, steps in (("without", engine.step_runner), ("with", engine.lora_step_runner))}
    for which in ([None] * 6, ["a", None, "b", "a", "b", None], ["b"] * 6):
        for name in adapters.folders:
            if name not in engine.adapters.loaded and name in which:
                engine.load_lora(name, adapters.folders[name])
        requests = [engine.add_request(prompt, GREEDY, lora=each) for prompt, each in zip(PROMPTS, which, strict=True)]
        run_all(engine)
        assert [request.output_token_ids for request in requests] == adapters.expected(PROMPTS, which)
    assert [tensor.data_ptr() for tensor in engine.adapters.tensors] == addresses
    for modes in ran.values():
        assert {"full", "piecewise"} <= set(modes) and "uncaptured" not in modes, ran
    assert_idle(engine)
    engine.close()


def test_one_row_is_compared_once_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for all lengths. Here it is off, so that neither has a graph of one row."""
    pools: list[KVPool] = []
    monkeypatch.setattr(one_row_check, "_errors", lambda served, pool, backend, tokens: pools.append(pool) or {"logits": 1.0})
    config = EngineConfig(num_pages=64, max_requests=4, max_batch_tokens=24, graph_extend_sizes=2, max_loras=1, gemv=True)
    with fixed_backend():
        engine = Engine(base(), config=config, recorder=TapeRecorder())
    assert len(pools) == len(one_row_check.TOKENS) and all(pool is engine.pool for pool in pools)
    for steps in (engine.step_runner, engine.lora_step_runner):
        assert steps is not None and steps.graphs is not None and min(steps.graphs.sizes("full")) == 2
        assert "one row alone gives logits that are off by 1" in "\n".join(steps.report().lines())
    engine.close()


def _ran(steps: Any) -> list[str]:
    """How each step from now on is run."""
    modes: list[str] = []
    run = steps.run

    def spied(step: Any) -> Any:
        modes.append(step.captured.key.mode if step.captured else "uncaptured")
        return run(step)

    steps.run = spied
    return modes
