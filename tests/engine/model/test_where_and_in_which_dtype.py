"""What is said of a device, a dtype or a pool that there cannot be, before weights are read; and where the package's own model lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paged_attn import LLM, SamplingParams
from paged_attn.engine import build_runtime
from paged_attn.engine.model.load_options import DEMO
from paged_attn.engine.model.loading import checked_dtype

REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"dtype": "float17"}, "dtype is 'float17'; allowed are bfloat16, float16 and float32"),
    ({"dtype": torch.int8}, "dtype is torch.int8; allowed are"),
    ({"device": "gpu"}, "device 'gpu' is not a device; allowed are cpu, cuda and cuda:N"),
    ({"device": "meta"}, "device 'meta' is not supported; allowed are cpu, cuda and cuda:N"),
    ({"device": "cuda:99"}, "device 'cuda:99': this machine shows"),
    ({"device": "cpu", "kv_memory_gib": 1e6}, r"kv_memory_gib is 1e\+06, and cpu has .* GiB in all; lower it"),
)


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_what_there_is_not(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LLM(DEMO, **given)


def test_a_pool_for_which_a_cpu_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any, **__: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(build_runtime, "KVPool", no_memory)
    with pytest.raises(
        ValueError, match=r"64 pages of 16 tokens of KV cannot be allocated on cpu; lower kv_memory_gib or num_pages.*Default"
    ):
        LLM(DEMO, num_pages=64, layer_groups=False)


def test_names_of_dtypes() -> None:
    assert checked_dtype("torch.bfloat16") == checked_dtype("bfloat16") == checked_dtype(torch.bfloat16) == torch.bfloat16
    assert checked_dtype("auto") is checked_dtype(None) is None


def test_the_packages_own_model_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with LLM(DEMO, dtype="float32") as llm:
        output = llm.generate(["Once"], SamplingParams(max_new_tokens=2), progress=False)[0]
        assert len(output.token_ids) == 2 and llm.engine.runner.dtype == torch.float32
    (tmp_path / DEMO).mkdir(parents=True)
    with pytest.raises((ValueError, OSError)):  # a folder of that name goes first
        LLM(DEMO)
