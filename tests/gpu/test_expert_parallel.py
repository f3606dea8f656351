"""`tests/gpu/expert_parallel.py` over two GPUs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

SECONDS = 540  # a command on the machine with GPUs ends after 600


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_whole_models_tokens_over_two_gpus() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.gpu.expert_parallel"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = started.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        started.terminate()  # killed, torchrun would leave its processes, which hold the GPUs
        output, _ = started.communicate()
        pytest.fail(f"not done after {SECONDS} s:\n{output[-6000:]}")
    assert started.returncode == 0, output[-6000:]
