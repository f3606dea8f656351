"""State in plain attributes of modules is kept for each request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paged_attn import LLM, SamplingParams, UnsupportedError
from paged_attn.recurrent.discover import find_attribute_layers
from paged_attn.recurrent.watching.attributes import attribute_states, owners_of, without_unused
from paged_attn.recurrent.watching.watch import Call
from tests.oracle import greedy, random_prompts
from tests.tiny_models import COMMON


def griffin(window: int = 8) -> PreTrainedModel:
    config = AutoConfig.for_model(
        "recurrent_gemma",
        **{**COMMON, "lru_width": 32, "attention_window_size": window, "num_hidden_layers": 3, "head_dim": 8},
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def inputs_of(length: int) -> dict[str, Any]:
    return {"input_ids": torch.arange(2, 2 + length)[None]}


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_seqs": 2}, {"page_size": 1, "max_batch_tokens": 8}, {"disable_passes": ("scans",)}], ids=str
)
def test_tokens_are_the_models_own(settings: dict[str, Any]) -> None:
    """Ragged prompts in chunks that mix with decoding, also with fewer slots than requests; twice, for the prefix cache."""
    model, prompts = griffin(), random_prompts((1, 5, 17, 33, 40))
    expected = [greedy(model, prompt, 8) for prompt in prompts]
    with LLM(model, **{"page_size": 4, "num_pages": 200, "max_batch_tokens": 16, **settings}) as llm:
        for _ in range(2):
            assert [done.token_ids for done in llm.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))] == expected
        layers, ops = llm.engine.runner.recurrent, () if "disable_passes" in settings else ("short_conv", "mamba1_scan")
        assert [(layer.spec.module, layer.ops) for layer in layers] == [(f"model.layers.{i}.temporal_block", ops) for i in (0, 1)]
    assert greedy(model, prompts[2], 8) == expected[2]


def test_a_window_longer_than_the_watched_calls(capfd: pytest.CaptureFixture[str]) -> None:
    """As published checkpoints have it (2,048): short calls are given no mask, the traced one is. Its failed first trace is not told."""
    model, prompt = griffin(window=2048), random_prompts((17,))[0]
    expected = greedy(model, prompt, 4)
    with LLM(model, page_size=4, num_pages=50, max_batch_tokens=16) as llm:
        assert llm.generate([prompt], SamplingParams(max_new_tokens=4, ignore_eos=True))[0].token_ids == expected
    assert "Error while creating guard" not in capfd.readouterr().err


def test_a_layer_says_what_it_keeps_and_what_it_can() -> None:
    first, _ = find_attribute_layers(griffin(), inputs_of)
    assert [(state.name, state.shape, state.dtype) for state in first.spec.states] == [
        ("conv1d_state", (32, 3), torch.float32), ("rg_lru.recurrent_states", (32,), torch.float32),
    ]  # fmt: skip
    assert not first.chunks and first.batches, "given several tokens it forgets its convolution's state"
    assert [operand.name for operand in first.operands] == ["input_states", "position_ids"]


class Summing(nn.Module):
    """Adds what came before; `masked`: reads its mask."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked = masked
        self.total: Tensor | None = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is not None or not self.masked
        start = torch.zeros_like(x[:, 0]) if self.total is None else self.total
        sums = start[:, None] + x.cumsum(1)
        self.total = sums[:, -1]
        return sums * mask.sum() if mask is not None and self.masked else sums


@pytest.mark.parametrize("masked", [False, True])
def test_what_is_not_read_is_left_out(masked: bool) -> None:
    module, x, mask = Summing(masked), torch.randn(1, 5, 4), torch.ones(1, 1, 5, 5)
    call = Call("sum", module, {"x": x, "mask": mask}, "", Summing(masked)(x, mask))
    assert without_unused(call) == (frozenset() if masked else {"mask"})
    assert (call.arguments["mask"] is None) is not masked and module.total is None


class Doubling(Summing):
    """Doubles its sums where it is given a mask, and reads none of its numbers."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x) * (1 if mask is None else 2)


class ByDims(Summing):
    """Reads no number of its mask, but how many dims it has."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x) * (2 if mask is not None and mask.dim() == 2 else 1)


@pytest.mark.parametrize("module", [Summing(False), Doubling(False), ByDims(False)], ids=["ignores", "counts on it", "looks at its dims"])
def test_what_was_none_may_be_any_tensor_if_it_is_not_read(module: Summing) -> None:
    x = torch.randn(1, 5, 4)
    call = Call("sum", module, {"x": x, "mask": None}, "", Summing(False)(x))
    assert without_unused(call) == ({"mask"} if type(module) is Summing else frozenset())
    assert call.arguments["mask"] is None and module.total is None


def test_outermost_owners_and_equal_shapes() -> None:
    short = {"a.state": torch.ones(1, 4), "a.b.state": torch.ones(1, 2), "a.seen": torch.ones(1, 3), "c.count": torch.ones(1)}
    long = {**short, "a.seen": torch.ones(1, 11), "d.state": torch.ones(1, 4)}
    paths = attribute_states(short, long)
    assert paths == ["a.b.state", "a.state"]
    assert owners_of(paths) == {"a": ["b.state", "state"]}


def test_a_layer_that_runs_twice_is_refused() -> None:
    model = griffin()
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(UnsupportedError, match=r"layers\.0\.temporal_block keeps recurrent state.* runs 2 times in one call"):
        find_attribute_layers(model, inputs_of)
