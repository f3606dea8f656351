"""Where graphs of mixture-of-experts models stop: transformers' own, and the example whose experts are the user's ops."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor, nn

from paged_attn import LLM, SamplingParams, UnsupportedError
from paged_attn.compiled.options import CompileOptions
from paged_attn.compiled_graph import CompiledGraph
from paged_attn.engine.runners.traced_runner import TracedRunner
from tests import tiny_models
from tests.oracle import random_prompts
from tests.zoo.build import build as build_of_zoo

ATTENTION, EXPERTS = "unified_attention_with_output", "module_with_output"


def stops(graph: CompiledGraph) -> list[str]:
    """The op of each break, in the order in which they run."""
    assert graph.split is not None
    names = [str(node.target) for node in graph.split.gm.graph.nodes if node.target in graph.split.breaks]
    calls = [[n.target for n in graph.split.gm.get_submodule(name).graph.nodes if n.op == "call_function"] for name in names]
    assert all(len(each) == 1 for each in calls)
    return [each[0]._opname for each in calls]  # type: ignore[union-attr]


def captured(model: nn.Module) -> CompiledGraph:
    torch._dynamo.reset()
    return TracedRunner(model, CompileOptions(inductor=False)).compiled


def test_mixtral_whose_experts_loop_stops_at_them() -> None:
    model = tiny_models.build("mixtral", num_hidden_layers=2)
    model.set_experts_implementation("eager")
    assert stops(captured(model)) == [ATTENTION, EXPERTS] * 2


def test_mixtral_with_grouped_experts_stops_at_attention_alone() -> None:
    model = tiny_models.build("mixtral", num_hidden_layers=2)
    model.set_experts_implementation("grouped_mm")
    assert stops(captured(model)) == [ATTENTION] * 2


def test_dbrx_stops_at_its_experts() -> None:
    model = build_of_zoo("dbrx")
    assert stops(captured(model)) == [ATTENTION, EXPERTS] * model.config.n_layers


def test_the_example_stops_at_its_own_ops_and_gives_its_own_tokens() -> None:
    """main() compares with the model's own loop and raises if they differ."""
    example = importlib.import_module("examples.moe_split_point")
    assert [len(tokens) for tokens in example.main()] == [12] * 4
    torch.manual_seed(0)
    assert stops(captured(example.MoE().eval())) == [ATTENTION, "experts", ATTENTION, "experts_into"] * 2


def test_opcheck_of_the_examples_ops() -> None:
    example = importlib.import_module("examples.moe_split_point")
    given = (
        torch.randn(5, 8),
        torch.rand(5, 2),
        torch.tensor([[0, 2], [2, 3], [3, 0], [2, 0], [0, 3]]),
        torch.randn(4, 8, 6),
        torch.randn(4, 6, 8),
    )
    x, weight, choice, up, down = given
    dense = torch.stack([torch.nn.functional.silu(x @ up[e]) @ down[e] for e in range(4)], 1)
    expected = (dense.gather(1, choice[..., None].expand(-1, -1, 8)) * weight[..., None]).sum(1)
    out = torch.empty_like(x)
    example.experts_into(*given, out)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(example.experts(*given), expected)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.moe_example.experts.default, given, test_utils=checks)
    torch.library.opcheck(torch.ops.moe_example.experts_into.default, (*given, out), test_utils=checks)


def test_an_op_that_mixes_tokens_is_refused() -> None:
    example = importlib.import_module("examples.moe_split_point")

    @torch.library.custom_op("split_experts::mixing", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
    def mixing(x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)

    mixing.register_fake(torch.empty_like)

    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return mixing(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(96, 64), example.Layer(into=False), Mixing(), nn.Linear(64, 96)).eval()
    with pytest.raises(UnsupportedError, match="layer at 2: a module that mixes tokens in a way of its own"):
        captured(model)


@pytest.mark.slow
def test_compiled_pieces_around_the_ops_give_the_same_tokens() -> None:
    """Above all: what an op writes into a tensor of one piece is seen by the next."""
    torch._dynamo.reset()
    example = importlib.import_module("examples.moe_split_point")
    torch.manual_seed(0)
    model, prompts = example.MoE().eval(), random_prompts((1, 5, 17))
    tokens = []
    for inductor in (False, True):
        with torch.no_grad(), LLM(model, inductor=inductor, num_pages=64) as llm:
            assert llm.engine.runner.compiled.compiled_by == ("Inductor pieces" if inductor else "eager pieces")
            tokens.append([c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=8))])
    assert tokens[0] == tokens[1]
