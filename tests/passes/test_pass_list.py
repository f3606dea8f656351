"""The list of passes: printed, switched off one by one, dumped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paged_attn import LLM
from paged_attn.cli.main import main
from paged_attn.engine.config import EngineConfig
from paged_attn.passes.optional import OPTIONAL
from paged_attn.passes.pass_list import PASSES
from tests.tiny_models import build, build_short

ALL = {"merge_linears": True, "early_logits_gather": True, "gemv": True, "num_pages": 16, "self_check": False}


def rewrite_of(model_type: str = "llama", make: Any = build, **settings: Any) -> Any:
    with LLM(make(model_type), **{**ALL, **settings}) as llm:
        return llm.engine.runner.compiled.rewrite


def did(rewrite: Any) -> set[str]:
    kept = {"experts": rewrite.experts, "merge_linears": rewrite.merges}
    return {name for name in OPTIONAL if kept.get(name, rewrite.counts[name])}


def test_every_optional_pass_can_be_switched_off_by_its_name() -> None:
    assert tuple(each.name for each in PASSES if each.optional) == OPTIONAL
    whole = did(rewrite_of("deepseek_v3", make=build_short))
    # tests/engine/test_recurrent.py, below, optimize/test_{float32_products,gated_delta_net,merge_rotations}.py
    elsewhere = {"scans", "gated_delta_net", "complex_as_real", "linear_float32", "merge_rotations"}
    assert whole == {*OPTIONAL} - elsewhere
    for name in whole:
        without = rewrite_of("deepseek_v3", make=build_short, disable_passes=(name,))
        lost = {name, *{"experts": ["routing"], "gemv": ["add_norm"]}.get(name, [])}  # routers are those of experts, and so on
        assert whole - did(without) == lost and name not in without.seconds


def test_complex_numbers_stay_where_that_is_asked() -> None:
    assert rewrite_of("llama4_text").counts["complex_as_real"] == 20
    assert rewrite_of("llama4_text", disable_passes=("complex_as_real",)).counts["complex_as_real"] == 0


@pytest.mark.parametrize("name", ["prove_attention", "nonsense"])
def test_a_pass_that_is_needed_or_not_there_is_named(name: str) -> None:
    allowed = (
        "latent_attention, experts, scans, gated_delta_net, complex_as_real, early_logits_gather, routing, merge_linears, merge_rotations, "
        "late_views, linear_float32, gemv, add_norm"
    )
    with pytest.raises(ValueError, match=f"'{name}'.* can be switched off are {allowed}"):
        EngineConfig(disable_passes=["gemv", name])


def test_the_graph_is_dumped_before_and_after_each_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_ATTN_DUMP", str(tmp_path))
    rewrite_of(disable_passes=("gemv",))
    (folder,) = tmp_path.iterdir()
    names = ["traced", *(each.name for each in PASSES if each.name != "gemv")]
    assert folder.name.endswith("-LlamaForCausalLM")
    assert sorted(path.name for path in folder.iterdir()) == [f"{i:02}-{name}.txt" for i, name in enumerate(names)]
    before, after = (folder.joinpath(f"0{i}-{names[i]}.txt").read_text() for i in (4, 5))
    assert before.count("scaled_dot_product_attention](") == 3 and "unified_attention_with_output" not in before
    assert after.startswith("# after replace_attention: 3 layers\n") and after.count("unified_attention_with_output.default](") == 3
    assert "     3 torch.ops.paged_attn.unified_attention_with_output.default\n" in after and "scaled_dot_product_attention" not in after


def test_the_command_prints_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line.split()[1:2] and line.split()[1] in ("always", "optional")] == [
        [each.name, "optional" if each.optional else "always"] for each in PASSES
    ]
