"""Layers that run their own forward, in full graphs on a GPU: the model's own tokens, beside padding and states of NaN."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from paged_attn import LLM, SamplingParams, explain
from tests.engine.steps.test_own_forward_steps import forget
from tests.engine.test_recurrent import OWN_FORWARD
from tests.oracle import greedy, random_prompts
from tests.zoo.build import build

NAMES = ("minimax", "recurrent_gemma", "rwkv", "xlstm")
PROMPTS = random_prompts((40, 1, 3, 21, 66, 2, 9), seed=5)
NEW = 12


def on_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    if name == "rwkv":
        from transformers.models.rwkv import modeling_rwkv

        def no_kernel(context_length: int) -> None:
            raise ImportError("its kernel lies on the Hub, which cannot be reached from here")

        monkeypatch.setattr(modeling_rwkv, "load_wkv_cuda_kernel", no_kernel)
    return copy.deepcopy(build(name)).to("cuda")


def expected(model: PreTrainedModel) -> list[list[int]]:
    tokens = []
    for index, prompt in enumerate(PROMPTS):
        forget(model)
        tokens.append(greedy(model, prompt, NEW - index))
    forget(model)
    return tokens


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_models_in_full_graphs(name: str, full_float32: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven requests in three slots, which end one after another: full graphs of 1 and 3 run 1, 2 and 3 requests."""
    model = on_gpu(name, monkeypatch)
    tokens = expected(model)
    modes: list[str] = []
    settings: dict[str, Any] = {
        "page_size": 4, "num_pages": 400, "max_requests": 3, "max_batch_tokens": 32, "graphs": "full", "graph_strict": True,
        "graph_decode_sizes": 2, "graph_extend_sizes": 2, "inductor": False, **OWN_FORWARD,
    }  # fmt: skip
    with LLM(model, **settings) as llm:
        text, steps = explain(llm), llm.engine.step_runner
        assert "in full graphs" in text and "not whole" not in text, text
        assert steps.graphs is not None and steps.report().full is not None, text
        full = [captured.segments for key, captured in steps.graphs.captured.items() if key.mode == "full"]
        assert full and not any(segments.num_calls for segments in full), text
        assert llm.engine.state_pool is not None
        llm.engine.state_pool.fill(float("nan"))
        run = steps.run
        monkeypatch.setattr(
            steps, "run", lambda step: (modes.append(step.captured.key.mode if step.captured else "uncaptured"), run(step))[1]
        )
        settings_of = [SamplingParams(max_new_tokens=NEW - index, ignore_eos=True) for index in range(len(PROMPTS))]
        for _ in range(2):  # the second time from snapshots, where there are some
            assert [done.token_ids for done in llm.generate(PROMPTS, settings_of)] == tokens
    assert set(modes) == {"full", "piecewise"}


def test_a_layer_that_waits_is_found_while_it_is_recorded_and_leaves_pieces(full_float32: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no CPU shows: a number that is copied from the host in each call."""
    model = on_gpu("minimax", monkeypatch)
    tokens = expected(model)
    (norm,) = (module.norm for module in model.modules() if type(module).__name__ == "MiniMaxLightningAttention")
    original = norm.forward
    norm.forward = lambda x: original(x) * torch.tensor([1.0], device=x.device)
    settings: dict[str, Any] = {
        "page_size": 4, "num_pages": 400, "max_requests": 3, "max_batch_tokens": 32, "inductor": False, **OWN_FORWARD,
    }  # fmt: skip
    with LLM(model, graph_decode_sizes=2, graph_extend_sizes=2, **settings) as llm:
        text = explain(llm)
        assert re.search(r"no graph +full 3.*recurrent_layer_with_output.* cannot be recorded", text), text
        done = llm.generate(PROMPTS[:3], SamplingParams(max_new_tokens=NEW - 2, ignore_eos=True))
        assert [each.token_ids for each in done] == [each[: NEW - 2] for each in tokens[:3]]
