"""Which rule a module has, in the words of each transformers; what cannot be shared out; no processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.parallel import plan, shard
from tests.tiny_models import build

TP = {"layers.*.mlp.experts": "moe_tp_experts", "layers.*.mlp.experts.down_proj": "rowwise", "layers.*.attn": "colwise"}
OLD = {
    "layers.*.mlp.gate": "ep_router", "layers.*.mlp.experts.down_proj": "grouped_gemm", "layers.*.mlp.experts": "moe_tp_experts",
}  # fmt: skip
NEW = {"layers.*.mlp.experts.down_proj": "grouped_gemm", "layers.*.mlp.experts": "ep_dispatch_experts"}


class Tiny(nn.Module):
    """Modules of these names, with the settings that a model was loaded with."""

    def __init__(self, ep_plan: dict[str, str], **settings: Any) -> None:
        super().__init__()
        layer = nn.ModuleDict({"attn": nn.Linear(2, 2), "mlp": nn.ModuleDict({"gate": nn.Linear(2, 2), "experts": nn.Module()})})
        layer["mlp"]["experts"].down_proj = nn.Parameter(layer["attn"].weight.detach()[None])  # type: ignore[index, union-attr]
        self.layers = nn.ModuleList([layer])
        self.tp_plan, self._ep_plan = TP, ep_plan
        self.config = SimpleNamespace(distributed_config=settings)


def styles(model: Tiny) -> dict[str, str]:
    return dict(plan._styles(model, plan._rules_of(model)))


@pytest.mark.parametrize(("ep_plan", "setting"), [(OLD, {"enable_expert_parallel": True}), (NEW, {"ep_size": 2, "tp_size": 2})])
def test_whole_experts_have_one_name(ep_plan: dict[str, str], setting: dict[str, Any]) -> None:
    found = styles(Tiny(ep_plan, **setting))
    assert found["layers.0.mlp.experts"] == plan.EXPERT_PARALLEL and found["layers.0.attn"] == "colwise"
    assert found.get("layers.0.mlp.gate") == ep_plan.get("layers.*.mlp.gate")


def test_without_the_setting_experts_are_cut_by_width() -> None:
    assert styles(Tiny(NEW, ep_size=1, tp_size=2)) == {"layers.0.mlp.experts": "moe_tp_experts", "layers.0.attn": "colwise"}


def test_what_an_expert_parallel_rule_names_has_no_other() -> None:
    assert plan.merged_rules(TP, {"layers.*.mlp": "all_reduce"}) == {"layers.*.attn": "colwise", "layers.*.mlp": "all_reduce"}


def test_tokens_that_would_be_sent_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="ep_implementation='all_to_all'; served are 'auto' and 'all_reduce'"):
        styles(Tiny(NEW, ep_size=2, ep_implementation="all_to_all"))
    model = Tiny(NEW, ep_size=2)
    model.config._experts_implementation = "deepgemm_megamoe"
    with pytest.raises(UnsupportedError, match="ep_implementation='deepgemm_megamoe'"):
        styles(model)


def test_experts_that_can_not_be_shared_out() -> None:
    with pytest.raises(UnsupportedError, match=r"experts\.gate_up_proj holds 4 experts, which 3 ranks cannot share evenly"):
        shard._refuse_uneven_experts(build("qwen3_moe"), 3)
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has no expert-parallel plan"):
        shard._refuse_uneven_experts(build("llama"), 2)
    shard._refuse_uneven_experts(build("qwen3_moe"), 2)
