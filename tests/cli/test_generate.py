"""`paged-attn generate` in process: texts, streams, JSON, the check."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch

from paged_attn.cli import check as check_module
from paged_attn.cli.main import main
from paged_attn.engine.engine import Engine
from paged_attn.engine.model.loading import checked_dtype
from paged_attn.engine.requests.outputs import TokenEvent
from tests.engine.lora.adapters import Adapters, base

SHORT = ["--max-new-tokens", "6", "--num-pages", "64"]


def generate(folder: Path, *flags: str) -> int:
    return main(["generate", "--model", str(folder), *SHORT, *flags])


def test_text_goes_to_stdout_and_numbers_to_stderr(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model_folder, "--prompt", "one", "--prompt", "a much longer second prompt", "--num-pages", "64", "--check") == 0
    out, err = capsys.readouterr()
    assert "[1] one\n" in out and "[2] a much longer second prompt\n" in out
    assert "tokens/s (12 new tokens)" in err and "first token" in err and "KV pool" in err
    assert "(63 pages of" in err, "without the reserved one"
    assert "check passed: all 12 new tokens equal" in err and "as one left-padded batch" in err


def interrupt_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Ctrl-C at the beginning of a step of the run, when one request runs."""
    step, calls = Engine.step, 0

    def interrupted(engine: Engine) -> list[TokenEvent]:
        nonlocal calls
        calls += engine.stats.steps > 0
        if len(engine.requests) == 1 and calls > steps:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "json"])
def test_ctrl_c_prints_what_there_is(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    goes_on = "It was"
    assert main(["generate", "--model", str(model_folder), "--prompt", goes_on, "--max-new-tokens", "6", "--ignore-eos"]) == 0
    whole = capsys.readouterr().out.strip("\n")
    interrupt_after(monkeypatch, 3)
    assert generate(model_folder, "--prompt", goes_on, "--ignore-eos", *flags) == 130
    out, err = capsys.readouterr()
    assert "1 of 1 answers cut off" in err and err.endswith("interrupted\n")
    if flags:
        (completion,) = json.loads(out)["completions"]
        assert completion["finish_reason"] == "cancelled" and 0 < len(completion["token_ids"]) < 6
        assert whole.startswith(completion["text"])
    else:
        text, mark, rest = out.partition("[cut off]")
        assert mark and rest == "\n" and text.strip("\n") and whole.startswith(text.strip("\n"))


def test_json_holds_completions_numbers_explanation_and_check(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--logprobs", "2", "--ignore-eos", "--repetition-penalty", "1.3", "--page-size", "4", "--no-prefix-cache", "--check")
    assert generate(model_folder, "--prompt", "It was", "--json", *flags) == 0
    found = json.loads(capsys.readouterr().out)
    completion, numbers = found["completions"][0], found["numbers"]
    assert len(completion["token_ids"]) == numbers["new_tokens"] == 6 and numbers["page_size"] == 4
    assert all(len(known) >= 2 for known in completion["logprobs"])
    assert found["check"]["passed"] and found["check"]["compared_tokens"] == 6
    assert found["explanation"]["graphs"][0]["layers"][0]["layer_ids"] == [0, 1, 2]


def test_streams_of_text_and_of_json_carry_the_same_text(
    model_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts").write_text("first line\n\nsecond line\n", encoding="utf-8")
    assert generate(model_folder, "--prompt-file", str(tmp_path / "prompts"), "--stream", "--json") == 0
    *events, document = map(json.loads, capsys.readouterr().out.splitlines())
    texts = ["".join(e["text"] for e in events if e["index"] == i) for i in range(2)]
    assert texts == [c["text"] for c in document["completions"]]
    monkeypatch.setattr("sys.stdin", io.StringIO("first line\nsecond line\n"))
    assert generate(model_folder, "--prompt-file", "-", "--stream") == 0
    assert capsys.readouterr().out == f"[1] first line\n{texts[0]}\n[2] second line\n{texts[1]}\n"


def test_a_failed_check_names_the_first_difference_and_exits_1(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = check_module.own_tokens

    def altered(llm, prompts, params):  # type: ignore[no-untyped-def]
        rows = honest(llm, prompts, params)
        rows[0][3] = (rows[0][3] + 1) % 256
        return rows

    monkeypatch.setattr(check_module, "own_tokens", altered)
    assert generate(model_folder, "--prompt", "x", "--check", "--ignore-eos") == 1
    assert "check FAILED: prompt 1, new token 4: paged_attn gives" in capsys.readouterr().err


@pytest.mark.parametrize("near", [True, False])
def test_in_16_bits_a_near_tie_of_the_models_own_logits_is_no_failure(
    near: bool, model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's runner-up counts as its choice, and the tokens after it as what it goes on with; only the margin says what that is."""

    def altered(llm, prompts, params):  # type: ignore[no-untyped-def]
        rows = honest(llm, prompts, params)
        if len(prompts) == 1:
            with torch.no_grad():
                logits = llm.engine.runner.model(torch.tensor([[*prompts[0], *rows[0][:3]]])).logits[0, -1].float()
            first, second = logits.topk(2).values
            margin = float((first - second) / logits.std())
            monkeypatch.setattr(check_module, "NEAR", margin * (1.01 if near else 0.99))
            rows[0][3] = int(logits.topk(2).indices[1])
        return rows

    honest = check_module.own_tokens
    monkeypatch.setattr(check_module, "own_tokens", altered)
    assert generate(model_folder, "--prompt", "x", "--check", "--ignore-eos", "--dtype", "bfloat16") == int(not near)
    told = capsys.readouterr().err
    assert ("check passed: 3 new tokens equal" in told and "1 of 1 prompts part from it" in told) is near
    assert ("check FAILED: prompt 1, new token 4" in told) is not near


def test_prompts_of_token_ids_need_no_tokenizer(model_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert generate(model_folder, "--prompt-ids", "72,101,108", "--prompt", "Hel", "--ignore-eos", "--json") == 0
    by_ids, by_text = json.loads(capsys.readouterr().out)["completions"]
    assert by_text["prompt_token_ids"] == [72, 101, 108] and by_ids["token_ids"] == by_text["token_ids"] and by_ids["prompt"] is None
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model_folder / name, tmp_path)
    ids = by_ids["token_ids"]
    flags = ("--ignore-eos", "--logprobs", "1", "--check", "--prompt-ids", "72 101 108")
    assert generate(tmp_path, *flags) == 0
    out, err = capsys.readouterr()
    first, scored, *_ = out.splitlines()
    assert first == ",".join(map(str, ids)) and scored.split()[1] == str(ids[0]) and "check passed" in err
    assert generate(tmp_path, "--ignore-eos", "--stream", "--prompt-ids", "72,101,108", "--prompt-ids", "1") == 0
    assert capsys.readouterr().out.startswith(f"[1] 72,101,108\n{' '.join(map(str, ids))} \n[2] 1\n")
    assert generate(tmp_path, "--prompt", "Hel") == 2
    assert "give --tokenizer DIR_OR_HUB_ID, or --prompt-ids" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        generate(tmp_path, "--prompt-ids", "1,b")
    assert "argument --prompt-ids: '1,b'; allowed are token ids" in capsys.readouterr().err


def test_an_adapter_generates_as_peft_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = Adapters(tmp_path, "llama", {"a": {}})
    base().save_pretrained(tmp_path / "model")
    flags = ("--prompt-ids", "5,6,7,8", "--ignore-eos", "--dtype", "float32")
    assert generate(tmp_path / "model", *flags, "--lora", own.folders["a"]) == 0
    assert capsys.readouterr().out.strip() == ",".join(map(str, own.generate("a", [5, 6, 7, 8], 6)))
    assert generate(tmp_path / "model", *flags) == 0
    assert capsys.readouterr().out.strip() == ",".join(map(str, own.generate(None, [5, 6, 7, 8], 6)))
    assert generate(tmp_path / "model", *flags, "--lora", own.folders["a"], "--check") == 2
    assert "--check compares with the unmodified model, and --lora changes it" in capsys.readouterr().err


def test_several_answers_to_each_prompt(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--prompt", "It was", "--prompt", "She", "--temperature", "1", "--seed", "3", "--ignore-eos")
    assert generate(model_folder, *flags, "-n", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    several = {(each["index"], each["answer"]): each["text"] for each in found["completions"]}
    assert list(several) == [(0, 0), (0, 1), (1, 0), (1, 1)] and several[0, 0] != several[0, 1]
    assert found["numbers"]["new_tokens"] == 4 * 6 and found["numbers"]["prompt_tokens"] == len("It was") + len("She")
    assert generate(model_folder, *flags, "--json") == 0
    assert [each["text"] for each in json.loads(capsys.readouterr().out)["completions"]] == [several[0, 0], several[1, 0]]
    assert generate(model_folder, *flags, "-n", "2", "--stream", "--json") == 0
    *events, _ = map(json.loads, capsys.readouterr().out.splitlines())
    streamed = {key: "".join(e["text"] for e in events if (e["index"], e["answer"]) == key) for key in several}
    assert streamed == several
    assert generate(model_folder, *flags, "-n", "2", "--stream") == 0
    shown = capsys.readouterr().out
    assert all(f"[{number}] {prompt}\n" in shown for number, prompt in enumerate(("It was", "It was", "She", "She"), 1))
    assert all(text in shown for text in several.values())
    assert generate(model_folder, "--prompt", "It was", "-n", "2", "--check") == 2
    assert "--check compares one greedy answer to each prompt, and -n asks for 2" in capsys.readouterr().err


@pytest.mark.parametrize(("word", "dtype"), [("half", "float16"), ("bf16", "bfloat16"), ("float", "float32")])
def test_types_have_the_names_that_they_have_elsewhere(
    word: str, dtype: str, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(model_folder, "--prompt", "It was", "--dtype", word) == 0
    assert f"Qwen3ForCausalLM in {dtype} on cpu" in capsys.readouterr().err
    assert checked_dtype(word) == checked_dtype(f"torch.{word}") == getattr(torch, dtype), "of LLM(dtype=...), too"
    with pytest.raises(SystemExit):
        generate(model_folder, "--prompt", "It was", "--dtype", "int8")
    assert "argument --dtype: invalid choice: 'int8' (choose from" in capsys.readouterr().err
