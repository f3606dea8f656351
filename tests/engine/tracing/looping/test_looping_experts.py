"""Blocks that loop over a list of experts are one op each, and serve the model's own tokens; the others stay as they are."""

from __future__ import annotations

import itertools
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from paged_attn import LLM, SamplingParams, UnsupportedError
from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.ops.module import MODULE
from paged_attn.attn_ops.ops.routing import ROUTE
from tests.engine.tracing.looping import blocks
from tests.engine.tracing.looping.blocks import EXPERTS as NUM_EXPERTS
from tests.engine.tracing.looping.blocks import HIDDEN, Capacity, Fused, Gated, MaskedLoop, Model, OneHotLoop, Plain, SharedExpert, greedy
from tests.oracle import random_prompts
from tests.tiny_models import build

GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)
PROMPTS = random_prompts((1, 5, 17, 33))
PROVED = ["OneHotLoop", "MaskedLoop", "SharedExpert", "Sorted", "CalledList", "ByHits", "OneExpert"]
ROUTERS = {"MaskedLoop": 0, "OneExpert": 0}  # whose router no `Routing` is: it stays as the model writes it


def count(llm: LLM, op: Any) -> int:
    return sum(node.target is op for node in llm.engine.runner.compiled.rewrite.gm.graph.nodes)


def experts_of(block: Any) -> nn.ModuleList:
    found: nn.ModuleList = block.experts
    return found


def assert_stacked(block: Any) -> None:
    """The weights of the experts lie in one memory each, one behind the other, and nobody else's copy is there."""
    experts = experts_of(block)
    for name, first in experts[0].named_parameters():
        own = [dict(expert.named_parameters())[name] for expert in experts]
        steps = {b.data_ptr() - a.data_ptr() for a, b in itertools.pairwise(own)}
        assert len({weight.untyped_storage().data_ptr() for weight in own}) == 1, name
        assert len(steps) == 1 and steps.pop() >= first.nbytes, name
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in experts.parameters()}
    assert sum(storages.values()) == sum(weight.nbytes for weight in experts.parameters())


@pytest.mark.parametrize("kind", PROVED)
def test_the_models_own_tokens_through_one_op_a_layer(kind: str) -> None:
    model = Model(getattr(blocks, kind)).eval()
    expected = [greedy(model, prompt, 8) for prompt in PROMPTS]
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    with LLM(model, num_pages=64, max_batch_tokens=16) as llm:
        assert count(llm, EXPERTS) == 2 and count(llm, MODULE) == 0 and count(llm, ROUTE) == ROUTERS.get(kind, 2)
        assert sum(node.target is torch.cat and len(node.args[0]) >= NUM_EXPERTS for node in graph_nodes(llm)) == 0
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected
        for block in model.blocks:
            assert_stacked(block)
    assert not any("forward" in vars(module) or module._forward_pre_hooks for module in model.modules())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert [greedy(model, prompt, 8) for prompt in PROMPTS] == expected


def graph_nodes(llm: LLM) -> Any:
    return llm.engine.runner.compiled.rewrite.gm.graph.nodes


@pytest.mark.parametrize("expert", [Fused, Plain, lambda: Gated(bias=True, activation=nn.functional.gelu)])
def test_experts_with_biases_and_other_gates(expert: Any) -> None:
    model = Model(lambda: OneHotLoop(expert)).eval()
    with LLM(model, num_pages=64, max_batch_tokens=16) as llm:
        assert count(llm, EXPERTS) == 2
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [greedy(model, prompt, 8) for prompt in PROMPTS]
        assert_stacked(model.blocks[0])


@pytest.mark.parametrize("favourite", [None, 0])
def test_one_expert_that_gets_every_token_and_others_that_get_none(favourite: int | None) -> None:
    """None: a router of zeros, whose ties fall as the model's own topk lets them fall."""
    model = Model(OneHotLoop).eval()
    for block in model.blocks:
        gate: Any = block.gate
        gate.weight.data.zero_()
        if favourite is not None:
            block.gate = nn.Linear(HIDDEN, NUM_EXPERTS)
            block.gate.weight.data.mul_(0.01)
            block.gate.bias.data = torch.tensor([9.0, 5.0, 0.0, 0.0, 0.0])
    with LLM(model, num_pages=64, max_batch_tokens=16) as llm:
        assert count(llm, EXPERTS) == 2
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [greedy(model, prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", ["OneHotLoop", "Sorted"])
def test_in_bfloat16(kind: str) -> None:
    model = Model(getattr(blocks, kind)).eval().bfloat16()
    with LLM(model, num_pages=64, max_batch_tokens=16) as llm:  # the self-check compares its logits with the model's
        assert count(llm, EXPERTS) == 2
        assert all(len(c.token_ids) == 8 for c in llm.generate(PROMPTS, GREEDY))
        assert_stacked(model.blocks[0])


def test_weights_that_are_written_are_followed() -> None:
    model = Model(OneHotLoop).eval()
    with LLM(model, num_pages=64) as llm:
        llm.generate(PROMPTS, GREEDY)
        model.load_state_dict(Model(OneHotLoop, seed=5).state_dict())
        expected = [greedy(model, prompt, 8) for prompt in PROMPTS]
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected
        with torch.no_grad():
            experts_of(model.blocks[0])[1].w2.weight.mul_(-3.0)  # type: ignore[union-attr, operator]
        now = [greedy(model, prompt, 8) for prompt in PROMPTS]
        assert now != expected and [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == now


def test_a_second_engine_finds_the_weights_as_they_lie() -> None:
    model = Model(OneHotLoop).eval()
    with LLM(model, num_pages=64) as one:
        where = [weight.data_ptr() for weight in model.parameters()]
        with LLM(model, num_pages=64) as two:
            assert count(two, EXPERTS) == 2 and [weight.data_ptr() for weight in model.parameters()] == where
            assert [c.token_ids for c in one.generate(PROMPTS, GREEDY)] == [c.token_ids for c in two.generate(PROMPTS, GREEDY)]


def test_the_graph_is_kept_for_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_ATTN_CACHE", str(tmp_path))
    expected = [greedy(Model(OneHotLoop).eval(), prompt, 8) for prompt in PROMPTS]
    for loaded in (False, True):
        model = Model(OneHotLoop).eval()
        with LLM(model, num_pages=64) as llm:
            assert ("loaded from disk" in llm.engine.runner.compiled.rewrite.seconds) == loaded
            assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected
            assert_stacked(model.blocks[0])
    monkeypatch.setattr(blocks, "CHOSEN", 1)  # what the block reads as it runs is evidence, too
    model = Model(OneHotLoop).eval()
    with LLM(model, num_pages=64) as llm:
        assert "loaded from disk" not in llm.engine.runner.compiled.rewrite.seconds
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [greedy(model, prompt, 8) for prompt in PROMPTS] != expected


def test_without_the_pass_the_blocks_are_called() -> None:
    model = Model(MaskedLoop).eval()
    where = [weight.data_ptr() for weight in model.blocks.parameters()]
    with LLM(model, num_pages=64, disable_passes=("experts",)) as llm:
        assert count(llm, EXPERTS) == 0 and count(llm, MODULE) == 2
        assert [weight.data_ptr() for weight in model.blocks.parameters()] == where


class Llama(OneHotLoop):
    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        result, _ = super().forward(hidden_states)
        return result


def llama() -> Any:
    model = build("llama", tie_word_embeddings=False, hidden_size=HIDDEN)
    torch.manual_seed(3)
    for layer in model.model.layers:
        layer.mlp = Llama()
    return model


def test_rows_are_picked_early_where_a_part_stands_for_the_experts_together() -> None:
    """The graph's input that takes all of them is one expert's while the graph is made."""
    from tests.oracle import greedy as generated

    model = llama()
    with LLM(model, num_pages=64) as llm:
        assert count(llm, EXPERTS) == len(model.model.layers)
        assert llm.engine.runner.compiled.rewrite.counts["early_logits_gather"] > 0
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [generated(model, prompt, 8) for prompt in PROMPTS]


def test_adapters_beside_experts(tmp_path: Path) -> None:
    """Those for attention and the router are served; those for experts have no place, and are refused."""
    peft = pytest.importorskip("peft")
    from tests.oracle import greedy as generated

    adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj", "gate"], task_type="CAUSAL_LM", r=4)).eval()
    for path, parameter in adapted.named_parameters():
        if "lora_" in path:
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(path))) * 0.3
    adapted.save_pretrained(tmp_path / "good")
    peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["w2"], task_type="CAUSAL_LM", r=4)).save_pretrained(tmp_path / "bad")
    model = llama()
    with LLM(model, num_pages=64, max_loras=2, max_lora_rank=4, max_batch_tokens=16, loras={"good": tmp_path / "good"}) as llm:
        assert count(llm, EXPERTS) == len(model.model.layers)
        got = llm.generate(PROMPTS, [SamplingParams(max_new_tokens=6, ignore_eos=True)] * 4, lora=["good", None, "good", None])
        with pytest.raises(UnsupportedError, match="experts"):
            llm.load_lora("bad", tmp_path / "bad")
    expected = [generated(adapted if i % 2 == 0 else model, prompt, 6) for i, prompt in enumerate(PROMPTS)]
    assert [c.token_ids for c in got] == expected


class Noisy(OneHotLoop):
    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden_states)[0] + torch.randn_like(hidden_states) * 1e-30 + torch.rand(()) * 0.1


class Skipped(OneHotLoop):
    """Its last expert is never asked."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        rows = hidden_states.view(-1, HIDDEN)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        result = torch.zeros_like(rows)
        for index, expert in enumerate(list(self.experts)[:-1]):
            row, place = torch.where(chosen == index)
            result.index_add_(0, row, expert(rows[row]) * weights[row, place, None])
        return result.view(hidden_states.shape)


class Changed(OneHotLoop):
    """Changes what its experts make."""

    def changed(self, made: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        rows = hidden_states.view(-1, HIDDEN)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        result = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(chosen == index)
            result.index_add_(0, row, self.changed(expert(rows[row])) * weights[row, place, None])
        return result.view(hidden_states.shape)


class Squared(Changed):
    """What experts make counts twice as much where it is positive."""

    def changed(self, made: Tensor) -> Tensor:
        return made + made.relu() * 0.01


class Clipped(Changed):
    """What experts make is clamped, which usual numbers never reach."""

    def changed(self, made: Tensor) -> Tensor:
        return made.clamp(-20, 20)


class Branching(OneHotLoop):
    """Calms itself where its logits explode."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        scale = 0.5 if self.gate(hidden_states).max() > 1e6 else 1.0
        return super().forward(hidden_states * scale)[0]


class Normed(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def tied(model: Model) -> None:
    experts_of(model.blocks[0])[0].w1.weight = experts_of(model.blocks[1])[0].w1.weight  # type: ignore[union-attr]


def in_other_memory(model: Model) -> None:
    for block in model.blocks:
        weight: Any = experts_of(block)[0].w1.weight  # type: ignore[union-attr]
        weight.data = torch.cat([weight.data, weight.data])[: len(weight)]


class Marked(nn.Parameter):
    pass


def of_a_kind(model: Model) -> None:
    for block in model.blocks:
        linear: Any = experts_of(block)[0].w1  # type: ignore[union-attr]
        linear.weight = Marked(linear.weight.data)


def hooked(model: Model) -> None:
    for block in model.blocks:
        experts_of(block)[0].register_forward_hook(lambda module, args, output: output * 2)


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "a capacity": (Capacity, None, "other numbers than its experts' rows by the weights"),
    "noise": (Noisy, None, "other numbers than its experts' rows by the weights"),
    "an expert that is skipped": (Skipped, None, "not a sum of its experts' rows"),
    "something behind an expert": (Squared, None, "not a sum of its experts' rows|other numbers than its experts' rows"),
    "a clamp behind an expert": (Clipped, None, "other numbers than its experts' rows by the weights"),
    "a branch on logits": (Branching, None, r"may branch on numbers \(__bool__\)"),
    "an unknown gate": (lambda: OneHotLoop(lambda: Gated(activation=torch.sin)), None, "compute nothing that is known of w1, w3, w2"),
    "a norm in an expert": (lambda: OneHotLoop(Normed), None, r"have 3 linear layers and besides \['norm.bias', 'norm.weight'\]"),
    "weights that two layers share": (OneHotLoop, tied, "cannot be moved into one tensor"),
    "weights that lie in a larger memory": (OneHotLoop, in_other_memory, "cannot be moved into one tensor"),
    "weights of a kind of its own": (OneHotLoop, of_a_kind, r"a weight of its experts is a Marked \[24, 32\] of torch.float32"),
    "a hook": (OneHotLoop, hooked, "experts.0 has hooks or a forward of its own"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_proved_stays_as_it_is(case: str, caplog: pytest.LogCaptureFixture) -> None:
    from paged_attn.engine.tracing.looping.as_ops import looping_experts_as_ops

    block, change, words = REFUSED[case]
    model = Model(block).eval()
    if change is not None:
        change(model)
    with caplog.at_level(logging.INFO, "paged_attn"), looping_experts_as_ops(model, inputs) as put:
        assert put == {}
    assert caplog.text.count("stays as it is: ") == 2
    assert re.search(words, caplog.text), caplog.text


@torch.compiler.disable
def doubled(x: Tensor) -> Tensor:
    """A function as those of torch are, which torch.compile does not trace."""
    return handle_torch_function(doubled, (x,), x) if has_torch_function_unary(x) else x * 2


class Doubling(SharedExpert):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return doubled(super().forward(hidden_states))


def test_a_block_whose_own_part_can_not_be_traced_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(Doubling).eval()
    with caplog.at_level(logging.INFO, "paged_attn"), LLM(model, num_pages=64, max_batch_tokens=16) as llm:
        assert count(llm, EXPERTS) == 0
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [greedy(model, prompt, 8) for prompt in PROMPTS]
    said = [record.getMessage() for record in caplog.records if record.name == "paged_attn"]
    assert any("blocks.0, blocks.1 stay as they are: what they compute around their experts cannot be traced" in line for line in said)


def inputs(length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.arange(length)[None], "position_ids": torch.arange(length)[None]}
