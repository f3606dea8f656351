"""Served models compute the end of their last layer for the wanted rows only, and give their own tokens: in chunks, ragged, in decode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paged_attn import LLM, SamplingParams
from paged_attn.compiled.options import CompileOptions
from paged_attn.engine.runners.traced_runner import TracedRunner
from paged_attn.graph_cache.graph_data import graph_data, graph_of
from paged_attn.passes.fx.graph_tools import name_of
from tests.oracle import greedy, random_prompts
from tests.recurrent_models import RECURRENT, recurrent
from tests.tiny_models import ARCHITECTURES, COMMON, build

PROMPTS = random_prompts((3, 30, 8, 17))
GREEDY = SamplingParams(max_new_tokens=8)
MORE: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "phi": {}, "gptj": {"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4, "n_inner": 48}, "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
    },
}  # fmt: skip
PRODUCTS = ("linear", "addmm", "matmul", "bmm", "grouped_mm_fallback")
# Where experts are not one op, they sort rows, which is not known to keep them apart: what comes before runs on all of them.
WRITTEN_OUT = {"mixtral": 1, "qwen3_moe": 1, "deepseek_v3": 4, "gpt_oss": 1}
LAST = {  # products from the last attention's output on, all of which run on N rows: o_proj, the MLP and the head
    "llama": 5, "qwen2": 5, "qwen3": 5, "mistral": 5, "gemma2": 5, "gemma3_text": 5, "phi3": 4, "gpt_neox": 4, "gpt2": 4, "opt": 4,
    "falcon": 4, "olmo2": 5, "granite": 5, "cohere2": 5, "mixtral": 3, "qwen3_moe": 3, "llama4_text": 5, "deepseek_v3": 6,
    "starcoder2": 4, "stablelm": 5, "phi": 4, "gptj": 4, "gpt_oss": 3, "falcon_h1": 6, "lfm2": 5, "bamba": 5, "jamba": 5, "mamba": 2,
    "mamba2": 2, "qwen3_next": 5,
}  # fmt: skip


def model_of(name: str) -> PreTrainedModel:
    if name in RECURRENT:
        return recurrent(name)
    if name in ARCHITECTURES:
        return build(name, tie_word_embeddings=False)
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**COMMON, "tie_word_embeddings": False, **MORE[name]})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def expected(model: PreTrainedModel) -> list[list[int]]:
    return [greedy(model, prompt, 8) for prompt in PROMPTS]


def tokens_of(model: PreTrainedModel, **settings: Any) -> tuple[list[list[int]], LLM]:
    llm = LLM(model, **{"page_size": 4, "num_pages": 200, "max_batch_tokens": 16, **settings})
    assert llm.engine.runner.compiled.rewrite.counts["early_logits_gather"] > 0
    return [c.token_ids for c in llm.generate(PROMPTS, GREEDY)], llm


class Shapes(fx.Interpreter):
    """Runs a graph and notes the shapes of its products, in the order of its calls."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.calls: list[dict[str, torch.Size]] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append({})
        return super().run(*args, **kwargs)

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if name_of(node) in PRODUCTS and isinstance(value, Tensor):
            self.calls[-1][node.name] = value.shape
        return value


def on_chosen_rows(llm: LLM) -> list[str]:
    """Products whose shapes are the same in steps of 5 and of 9 tokens with one wanted row; a graph from disk has no shapes of its own."""
    compiled = llm.engine.runner.compiled
    compiled._run_paged = (shapes := Shapes(compiled.rewrite.gm)).run
    prompts = random_prompts((5, 9), seed=7)
    llm.generate(prompts[0], SamplingParams(max_new_tokens=1))
    llm.generate(prompts[1], SamplingParams(max_new_tokens=1))
    few, more = shapes.calls
    return [name for name, shape in few.items() if more[name] == shape]


@pytest.mark.parametrize("name", LAST)
def test_tokens_are_those_of_the_model(name: str) -> None:
    model = model_of(name)
    got, llm = tokens_of(model)
    assert got == expected(model)
    assert len(on_chosen_rows(llm)) == LAST[name]


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_experts_as_they_are_written(name: str) -> None:
    model = model_of(name)
    got, llm = tokens_of(model, disable_passes=("experts",))
    assert got == expected(model)
    assert len(on_chosen_rows(llm)) == WRITTEN_OUT[name]


def test_the_last_mlp_sees_as_many_rows_as_are_sampled_from(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    linear, seen = F.linear, list[tuple[int, int]]()

    def counting(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append((x.numel() // x.shape[-1], weight.shape[0]))
        return linear(x, weight, bias)

    llm = LLM(model, page_size=4, num_pages=200, max_batch_tokens=64)
    gm = llm.engine.runner.compiled.rewrite.gm
    assert gm is not None
    for node in gm.graph.nodes:
        node.target = counting if node.target is linear else node.target
    llm.engine.runner.compiled._run_paged = fx.GraphModule(gm, gm.graph).forward
    llm.generate([PROMPTS[1], PROMPTS[3]], SamplingParams(max_new_tokens=1))
    rows = [rows for rows, width in seen if width == 48]
    assert rows == [47, 47] * 2 + [2, 2], "gate and up of three layers, for two prompts of 30 and 17 tokens"
    assert [rows for rows, _ in seen[-5:]] == [2] * 5


@pytest.mark.parametrize(("name", "products"), [("llama", 4), ("deepseek_v3", 5)])
def test_merged_linears_take_the_chosen_rows(name: str, products: int) -> None:
    model = model_of(name)
    want = expected(model)
    got, llm = tokens_of(model, merge_linears=True)
    assert got == want and llm.engine.runner.compiled.rewrite.merges
    assert len(on_chosen_rows(llm)) == products


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_such_a_graph_can_be_kept(name: str) -> None:
    gm = TracedRunner(model_of(name), CompileOptions(passes=("early_logits_gather",))).compiled.rewrite.gm
    assert gm is not None
    again = graph_of(graph_data(gm), torch.device("cpu"))
    assert [node.name for node in again.graph.nodes] == [node.name for node in gm.graph.nodes]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "phi"])
def test_pieces_that_inductor_compiled_take_both_kinds_of_rows(name: str) -> None:
    model = model_of(name)
    got, llm = tokens_of(model, inductor=True)
    assert got == expected(model)
    report = llm.engine.runner.compiled.pieces
    assert report is not None and report.distinct == report.pieces - 1, "pieces between attentions stay equal"
