"""`paged-attn backends` with flags for a layer: the order in which "auto" looks, what it takes, and why not the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paged_attn.backends.selection.tuned import Entry, Kind, current_versions, write_entry
from paged_attn.cli.main import main
from tests.backends.fake_backends import Machine, machine

__all__ = ["machine"]


@pytest.fixture(autouse=True)
def _wide_and_untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("PAGED_ATTN_TUNED", "none")


def lines_of(capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    assert main(["backends", *flags]) == 0
    return capsys.readouterr().out.splitlines()


def row(lines: list[str], name: str) -> str:
    """The cells of a backend's row on one line."""
    start = next(i for i, line in enumerate(lines) if f"  {name} " in line)
    more = [line for line in lines[start + 1 :]]
    until = next((i for i, line in enumerate(more) if not line.startswith("   ")), len(more))
    return " ".join(" ".join([lines[start], *more[:until]]).split())


def test_the_order_on_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines = lines_of(capsys, "--head-dim", "64")
    assert lines[0].startswith("32 heads over 8 KV, dim 64, causal, scale 0.125, float32, pages of 16, on cpu")
    assert lines[1] == '"auto" takes torch_native (first that fits every layer in the order for a CPU)'
    assert row(lines, "torch_native") == "1 torch_native yes" and row(lines, "fa3").startswith("- fa3 runs on cuda, not on cpu")


def test_the_order_on_another_gpu(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.put("trtllm_mha", phases=frozenset({"decode"}))
    machine.put("flashinfer", features=frozenset())
    lines = lines_of(capsys, "--on", "sm100", "--softcap", "30", "--window", "5", "--sinks", "--chunk", "64", "--dtype", "bfloat16")
    assert lines[0] == (
        "32 heads over 8 KV, dim 128, causal, window 5, chunk 64, softcap 30, sinks, scale 0.08839, bfloat16, pages of 16, on cuda SM100"
    )
    assert lines[1] == '"auto" takes triton,trtllm_mha (triton for prefill and trtllm_mha for decode: ' + (
        "the first that fit every layer in the order for Blackwell)"
    )
    assert row(lines, "trtllm_mha") == "1 trtllm_mha prefill: serves decode, not extend; decode: yes"
    assert row(lines, "flashinfer") == "2 flashinfer no: no chunked attention; no attention sinks; no softcap; no sliding window"
    assert row(lines, "fa3") == "- fa3 by name only: it is not in the order for Blackwell"


def test_deterministic_and_nothing_that_fits(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, "--on", "SM90", "--deterministic", "--page-size", "4")
    assert lines[0].endswith("bfloat16, pages of 4, on cuda SM90, deterministic")
    assert lines[1] == '"auto" takes nothing: none fits in the order for Hopper'
    assert row(lines, "fa3") == "1 in prefill, 2 in decode fa3 no: no batch-invariant results"


def test_measurements_show_in_it(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAGED_ATTN_TUNED", str(tmp_path / "t.json"))
    times = {"extend": {"a": {"triton": 2.0, "fa3": 1.0}}, "decode": {"a": {"triton": 1.0, "fa3": 2.0}}}
    kind = Kind(4, 128, 128, "bfloat16", "bfloat16", 16)
    write_entry(tmp_path / "t.json", "Test GPU", Entry(kind, "today", current_versions(), times))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    lines = lines_of(capsys, "--dtype", "bfloat16")
    assert lines[1].startswith('"auto" takes fa3,triton (fa3 for prefill and triton for decode')
    assert row(lines, "fa3").startswith("1 in prefill, 2 in decode fa3 yes, measured 1.00 x the fastest in prefill, 2.00 x")
    assert lines_of(capsys, "--dtype", "bfloat16", "--on", "sm90")[1].startswith('"auto" takes fa3,triton (')  # not this GPU, perhaps


def test_a_layer_of_a_model(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((model_folder / "config.json").read_text())
    expected = f"{config['num_attention_heads']} heads over {config['num_key_value_heads']} KV, dim {config['head_dim']}, causal"
    assert lines_of(capsys, "--model", str(model_folder))[0].startswith(expected)
    assert ", dim 24, causal" in lines_of(capsys, "--model", str(model_folder), "--head-dim", "24")[0]
    assert ", dim 24/8, " in lines_of(capsys, "--model", str(model_folder), "--head-dim", "24", "--v-head-dim", "8")[0]


def test_latent_attention_has_keys_of_every_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import DeepseekV3Config

    DeepseekV3Config(num_attention_heads=16, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=96).save_pretrained(tmp_path)
    assert lines_of(capsys, "--model", str(tmp_path))[0].startswith("16 heads over 16 KV, dim 192/96, causal")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--on", "toaster"], "--on 'toaster' is not a device; allowed are cpu, cuda"),
        (["--head-dim", "0"], "--head-dim is 0; allowed are values of at least 1"),
        (["--page-size", "-1"], "--page-size is -1"),
        (["--q-heads", "7"], "7 query heads over 8 KV heads"),
        (["--model", "/no/such/model"], "no model at '/no/such/model'"),
        (["--markdown", "--window", "4"], "--markdown prints the table for all layers"),
        (["--window", "0"], "sliding_window is 0"),
    ],
)
def test_errors_of_the_user(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_here_must_be_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["backends", "--on", "cuda"]) == 2
    assert "this machine has none; say which, as sm90 or sm100" in capsys.readouterr().err


def test_a_config_without_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import MambaConfig

    MambaConfig().save_pretrained(tmp_path)
    assert main(["backends", "--model", str(tmp_path)]) == 2
    assert "(mamba) does not say its attention heads; give --q-heads" in capsys.readouterr().err


def test_settings_of_the_engine_reach_the_selection(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate = ["generate", "--model", str(model_folder), "--num-pages", "8", "--prompt", "x", "--max-new-tokens", "2"]
    assert main([*generate, "--backend", "torch_native", "--deterministic"]) == 2
    error = capsys.readouterr().err
    assert "torch_native: no batch-invariant results" in error and "What fits, with batch-invariant results: reference" in error
    assert main([*generate, "--deterministic", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["explanation"]["backend"] == "reference"
    assert main([*generate, "--backend", "torch_native,reference", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["explanation"]["backend"] == "torch_native,reference"
    with pytest.raises(SystemExit):
        main([*generate, "--speculative-backend", "decode"])
    assert "an LLM has no speculative decoding yet; leave it out" in capsys.readouterr().err
