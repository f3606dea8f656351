"""`paged-attn serve` and `generate` under torchrun: one program over two processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from paged_attn import LLM, SamplingParams
from paged_attn.cli.main import main
from paged_attn.parallel.torchrun import join
from tests.cli.ready import url_when_ready
from tests.tiny_models import build

DEMO = files("paged_attn.demo_model")
DEVICE = "cuda" if torch.cuda.device_count() >= 2 else "cpu"  # NCCL and captured graphs, or gloo
PROMPTS = ["It was", "Her sister, who", "Mr. Knightley had never", "the"]
SETTINGS = ["--device", DEVICE, "--dtype", "float32", "--num-pages", "64", "--max-batch-tokens", "16"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "paged_attn.cli.main"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@contextmanager
def two_processes(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """torchrun in a process group of its own, of which nothing is left afterwards."""
    with subprocess.Popen([*TORCHRUN, *arguments], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True) as started:
        try:
            yield started
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)


def first_rank(torchrun: subprocess.Popen[str]) -> int:
    """The process id of rank 0."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    (found,) = [int(child) for child in children if b"\0RANK=0\0" in Path(f"/proc/{child}/environ").read_bytes()]
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights and the demo's tokenizer of 257 tokens; transformers 5.17 gathers no head of odd size."""
    path = tmp_path_factory.mktemp("checkpoints") / "even"
    build("llama", vocab_size=258, hidden_size=64, head_dim=16, max_position_embeddings=512).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((DEMO / name).read_bytes())
    return str(path)


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> list[list[int]]:
    with LLM(checkpoint, dtype=torch.float32, device=DEVICE, num_pages=64) as llm:
        return [c.token_ids for c in llm.generate(PROMPTS, SamplingParams(max_new_tokens=20, ignore_eos=True))]


@pytest.mark.slow
def test_a_server_over_two_ranks(checkpoint: str, expected: list[list[int]]) -> None:
    """The whole model's tokens, whoever asks at once; a client that leaves; an error; and all processes end when the first is told to."""
    with two_processes("serve", "--model", checkpoint, "--port", "0", *SETTINGS) as server:
        url = url_when_ready(server)
        body = {"model": "even", "max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        with httpx.Client(base_url=url, timeout=60) as http, ThreadPoolExecutor(len(PROMPTS)) as pool:

            def ids(prompt: str, **changes: Any) -> Any:
                reply = http.post("/v1/completions", json={**body, "prompt": prompt, **changes})
                assert reply.status_code == 200, reply.text
                return reply.json()["choices"][0]["token_ids"]

            assert list(pool.map(ids, PROMPTS)) == expected
            with http.stream("POST", "/v1/completions", json={**body, "prompt": "It was", "max_tokens": 200, "stream": True}) as leaving:
                next(leaving.iter_lines())
            assert http.post("/v1/completions", json={**body, "prompt": [10**6]}).status_code == 400
            assert ids("It was", seed=3, temperature=1.0) == ids("It was", seed=3, temperature=1.0)
            assert list(pool.map(ids, PROMPTS)) == expected
        os.kill(first_rank(server), signal.SIGTERM)
        said = server.communicate(timeout=60)[1]
        assert server.returncode == 0, said
        with pytest.raises(ProcessLookupError):
            os.killpg(server.pid, 0)


@pytest.mark.slow
def test_generate_over_two_ranks_says_everything_once(checkpoint: str, expected: list[list[int]]) -> None:
    asked = [flag for prompt in PROMPTS for flag in ("--prompt", prompt)]
    command = [*TORCHRUN, "generate", "--model", checkpoint, *SETTINGS, *asked, "--max-new-tokens", "20", "--ignore-eos", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [c["token_ids"] for c in json.loads(done.stdout)["completions"]] == expected
    assert "tokens/s" not in done.stderr


@pytest.mark.slow
def test_generate_with_whole_experts_in_each_process(tmp_path: Path) -> None:
    path = tmp_path / "experts"
    build("qwen3_moe", vocab_size=258, hidden_size=64, head_dim=16, max_position_embeddings=512, num_experts=8).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((DEMO / name).read_bytes())
    with LLM(path, dtype=torch.float32, device=DEVICE, num_pages=64) as llm:
        expected = [c.token_ids for c in llm.generate(PROMPTS, SamplingParams(max_new_tokens=20, ignore_eos=True))]
    asked = [flag for prompt in PROMPTS for flag in ("--prompt", prompt)]
    command = [*TORCHRUN, "generate", "--model", str(path), "--expert-parallel", *SETTINGS, *asked]
    done = subprocess.run(
        [*command, "--max-new-tokens", "20", "--ignore-eos", "--json"], capture_output=True, text=True, env=ENVIRONMENT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert [c["token_ids"] for c in json.loads(done.stdout)["completions"]] == expected


def test_one_process_shares_out_no_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(DEMO), "--prompt", "x", "--expert-parallel"]) == 2
    assert "expert parallelism is over several processes, and this is one" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["demo"], ["doctor"], ["warmup", "--model", str(DEMO)], ["bench", "--smoke"]])
def test_other_commands_run_in_one_process(command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(command) == 2
    assert "torchrun started 2 processes, and this command runs in one" in capsys.readouterr().err


@pytest.mark.parametrize(("device", "why"), [("cuda:1", "is one GPU for 2 processes"), ("cuda", "process 7 of this machine finds . GPUs")])
def test_each_process_needs_a_gpu_of_its_own(device: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "7")
    with pytest.raises(ValueError, match=why):
        join(torch.device(device))
