"""Experts whose rows lie in matrices [E n, m], as DBRX's: found by shapes, proved on numbers, one op each, no weight held twice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.engine import Engine
from paged_attn.engine.tracing.experts_as_ops import experts_as_ops, is_experts, proved_experts
from tests.capture.tape import TapeRecorder
from tests.engine.models import random_prompts as prompts_of
from tests.engine.models import run_all
from tests.engine.steps.test_captured_steps import fixed_backend
from tests.oracle import greedy, random_prompts
from tests.zoo.build import build

EXPERTS_OF, HIDDEN, INNER = 5, 8, 6
GATES: dict[str, tuple[Gating, Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (Gating(), lambda gate, up: F.silu(gate) * up),
    "up first": (Gating("gelu", up_first=True), lambda up, gate: F.gelu(gate) * up),
}


class Flat(nn.Module):
    """All weights as matrices: gate and up apart (`parts` 2) or in one matrix (1), or no gate (0); the second as it is given or turned."""

    def __init__(self, parts: int = 2, turned: bool = True, gate: str = "silu", dims: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts, self.turned, self.gate, self.dims, self.num_experts = parts, turned, GATES[gate][1], dims, EXPERTS_OF
        wide = INNER * (2 if parts == 1 else 1)
        self.a = nn.Parameter(torch.randn(EXPERTS_OF * wide, HIDDEN))
        if parts == 2:
            self.b = nn.Parameter(torch.randn(EXPERTS_OF * INNER, HIDDEN))
        self.c = nn.Parameter(torch.randn(*((EXPERTS_OF * INNER, HIDDEN) if turned else (EXPERTS_OF * HIDDEN, INNER))))

    def one(self, rows: Tensor, expert: int) -> Tensor:
        a, c = (weight.view(EXPERTS_OF, -1, weight.shape[1])[expert] for weight in (self.a, self.c))
        if self.parts == 2:
            inner = self.gate(rows @ a.t(), rows @ self.b.view(EXPERTS_OF, -1, HIDDEN)[expert].t())
        elif self.parts == 1:
            inner = self.gate(*(rows @ a.t()).chunk(2, -1))
        else:
            inner = torch.relu(rows @ a.t())
        return inner @ (c if self.turned else c.t())

    def forward(self, tokens: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        assert tokens.dim() == self.dims
        flat = tokens.reshape(-1, HIDDEN)
        out = torch.zeros_like(flat)
        for expert in chosen.unique().tolist():
            rows, which = torch.where(chosen == expert)
            out.index_add_(0, rows, self.one(flat[rows], expert) * scores[rows, which, None])
        return out.view_as(tokens)


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize(("parts", "gate"), [(2, "silu"), (2, "up first"), (1, "silu"), (1, "up first"), (0, "silu")])
def test_what_matrices_hold_is_found_on_numbers(parts: int, gate: str, turned: bool) -> None:
    found = proved_experts(Flat(parts, turned, gate))
    assert found is not None and found.dims == 2 and found.layout.experts == EXPERTS_OF
    assert found.gating == (GATES[gate][0] if parts else Gating("relu", gated=False))


def test_hidden_states_with_a_batch_axis() -> None:
    found = proved_experts(Flat(dims=3))
    assert found is not None and found.dims == 3


class Within(nn.Module):
    """The weights lie in a module within, and what computes them there is told which."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Flat()
        del self.mlp.num_experts
        self.n_exp = EXPERTS_OF

    def forward(self, tokens: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        return Flat.forward(self.mlp, tokens, chosen, scores)


def test_weights_of_a_module_within() -> None:
    found = proved_experts(Within())
    assert found is not None and found.layout.first == ("mlp.a", "mlp.b") and found.layout.second == "mlp.c"  # type: ignore[union-attr]


CHANGES: dict[str, Callable[[Flat], Any]] = {
    "a number of experts that nobody names": lambda m: delattr(m, "num_experts"),
    "fewer than there are": lambda m: setattr(m, "num_experts", 3),
    "another weight": lambda m: setattr(m, "more", nn.Parameter(torch.ones(2))),
    "a buffer": lambda m: m.register_buffer("more", torch.ones(2)),
    "a hook": lambda m: m.register_forward_hook(lambda *_: None),
    "a weight of linear layers": lambda m: setattr(m, "b", None) or setattr(m, "linear", nn.Linear(HIDDEN, EXPERTS_OF * INNER, bias=False)),
    "another gate": lambda m: setattr(m, "gate", lambda gate, up: gate.sin() * up),
    "an expert that is skipped": lambda m: setattr(m, "one", lambda rows, expert: Flat.one(m, rows, expert) * (expert != 1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_known_is_left_alone(change: str) -> None:
    module = Flat()
    CHANGES[change](module)
    assert proved_experts(module) is None
    with experts_as_ops(nn.Sequential(module)) as count:
        assert count == 0


def dbrx(**changes: int) -> Any:
    return build("dbrx", n_layers=2, ffn_config={"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 48, "hidden_size": 32, **changes})


def weights_of(model: nn.Module) -> list[tuple[Any, Any, Any]]:
    return [(module.mlp.w1, module.mlp.v1, module.mlp.w2) for module in model.modules() if is_experts(module)]


def test_dbrx_gives_its_own_tokens_through_one_op_a_layer_and_holds_each_weight_once() -> None:
    model, prompts = dbrx(), random_prompts((1, 5, 17))
    layers = model.config.n_layers
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):  # the second finds the weights where the first has put them
        with LLM(model, num_pages=64, max_batch_tokens=16) as llm:
            found = llm.engine.runner.compiled.rewrite  # type: ignore[attr-defined]
            assert found.experts == {"one_by_one": layers} and found.counts["routing"] == layers
            assert llm.engine.runner.experts_per_choice == 2  # four, of which a token chooses two
            assert not [node for node in found.gm.graph.nodes if node.target is torch.cat and "parameters" in str(node.args)]
            bound = [tensor for tensor in llm.engine.runner.inputs.owned if tensor.dim() == 2]  # type: ignore[attr-defined]
            got = llm.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))
        assert [completion.token_ids for completion in got] == [greedy(model, prompt, 8) for prompt in prompts]
        for w1, v1, w2 in weights_of(model):
            assert v1.data_ptr() == w1.data_ptr() + w1.nbytes and w1.untyped_storage().nbytes() == w1.nbytes + v1.nbytes
            assert any(tensor.data_ptr() == w1.data_ptr() and tensor.nbytes == w1.nbytes + v1.nbytes for tensor in bound)
            assert any(tensor.data_ptr() == w2.data_ptr() and tensor.shape == w2.shape for tensor in bound)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_dbrx_decodes_in_full_graphs() -> None:
    model = dbrx()
    (prompt,) = prompts_of(6, 5)
    settings: dict[str, Any] = {"page_size": 4, "num_pages": 64, "max_requests": 4, "max_batch_tokens": 24, "graph_decode_sizes": 4}
    with fixed_backend():
        engine = Engine(model, config=EngineConfig(**settings, graph_extend_sizes=2, graph_strict=True), recorder=TapeRecorder())
    assert engine.step_runner.report().full.sizes
    request = engine.add_request(prompt, SamplingParams(max_new_tokens=6, ignore_eos=True))
    run_all(engine)
    assert request.output_token_ids == greedy(model, prompt, 6)
    engine.close()


def test_dbrx_saves_what_it_loaded(tmp_path: Any) -> None:
    model = dbrx()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with LLM(model, num_pages=32):
        pass
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in again.state_dict().items())


def test_weights_that_somebody_else_has_stay_where_they_are(caplog: pytest.LogCaptureFixture) -> None:
    model = dbrx()
    experts = [module for module in model.modules() if is_experts(module)]
    model.also = experts[0].mlp.v1
    where = [weight.data_ptr() for weight in weights_of(model)[0]]
    with caplog.at_level(logging.INFO, "paged_attn"), experts_as_ops(model) as count:
        assert count == len(experts) - 1
    assert "transformer.blocks.0.ffn.experts stays as it is: the weights [192, 32] of its experts cannot be moved" in caplog.text
    assert [weight.data_ptr() for weight in weights_of(model)[0]] == where


def test_where_the_pass_is_off_a_graph_has_no_op() -> None:
    with LLM(dbrx(), num_pages=32, disable_passes=("experts",)) as llm:
        found = llm.engine.runner.compiled.rewrite  # type: ignore[attr-defined]
        assert not found.experts and not any(node.target is EXPERTS for node in found.gm.graph.nodes)
