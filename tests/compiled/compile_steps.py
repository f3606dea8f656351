"""Compiles a model's steps ahead for the GPU that is named, without having it, then asks for the kernels of many steps; prints what was
compiled ahead, what of it could not be, and what was not. `python -m tests.compiled.compile_steps h100 llama|deepseek_v2|..`"""

from __future__ import annotations

import json
import sys
from concurrent.futures import wait
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from triton import knobs
from triton.runtime import driver

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.backends import fast_launch
from paged_attn.backends.attention.triton import plan
from paged_attn.backends.attention.triton.backend import TritonBackend
from paged_attn.backends.compiling import compile_ahead
from paged_attn.backends.compiling.compile_job import CompilingDriver
from paged_attn.backends.scans.triton import conv, prompts, steps
from paged_attn.compiled import steps_ahead
from paged_attn.compiled.steps_ahead import compile_steps_ahead
from paged_attn.recurrent.run import runner_of
from tests.backends.gpus import named, only_compiled
from tests.compiled.traced import steps_of, traced

PAGE_SIZE = 16
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 40_000,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128},
    "deepseek_v2": {
        "num_attention_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "q_lora_rank": None, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1,
    },
    "qwen3_next": {
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "bamba": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 128,
        "attn_layer_indices": [1],
    },
}  # fmt: skip
STEPS = (
    [(9, 1)], [(2_500, 1)], [(100, 1)] * 3, [(1, 1)] * 40, [(2000, 1)] * 40, [(33_000, 1)] * 5,
    [(0, 32)], [(0, 1000)], [(0, 64)] * 9, [(0, 3000)], [(0, 9000)],
    [(200, 1)] * 20 + [(0, 300)], [(30_000, 1)] * 3 + [(0, 2500)] * 2, [(6000, 3000)], [(0, 40), (0, 2)], [(0, 5)], [(0, 20)], [(50, 9)],
)  # fmt: skip


def main() -> None:
    driver.set_active(CompilingDriver(named().target))  # type: ignore[arg-type]
    plan.machine_of = lambda device: named().machine  # type: ignore[assignment]
    backend = TritonBackend()
    backend._machine_of = plan.machine_of
    steps_ahead.select = lambda *given, **settings: type("Chosen", (), {"backend": backend})  # type: ignore[assignment]
    kind = sys.argv[2]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | SHAPES[kind])), dtype=torch.bfloat16).eval()
    runner = traced(model)
    runs_with = steps_of(runner, PAGE_SIZE)
    runner.compiled.recurrent = runs_with.recurrent
    assert runner.compiled.rewrite.gm is not None
    compile_steps_ahead(runner.compiled.rewrite.gm.graph, runner.layers, torch.bfloat16, torch.device("cpu"), runs_with)
    wait(compile_ahead._asked.values())
    ahead = sorted(kernel.__name__ for kernel, *_ in compile_ahead._asked)
    failed = [str(future.exception()) for future in compile_ahead._asked.values() if future.exception()]

    later: dict[str, list[str]] = {}
    step = ""

    def noted(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            later.setdefault(step, []).append(src.name)

    knobs.compilation.listener = noted
    for module in (fast_launch, conv, prompts, steps):
        module.launch = only_compiled  # type: ignore[attr-defined]
    fast_launch.FastKernel.__call__ = lambda self, key, grid, *given: self._launch(grid, *given[:3]) and None  # type: ignore[method-assign]
    pool = KVPool(runner.layers, 40_000 // PAGE_SIZE, PAGE_SIZE, torch.bfloat16)
    states = runner_of(runs_with.recurrent, 50, torch.device("cpu"))
    for lengths in STEPS:
        step = str(lengths[:1] + lengths[-1:])
        requests = [
            BatchRequest([0] * new, [1] * -(-(cached + new) // PAGE_SIZE), cached, state_slot=slot)
            for slot, (cached, new) in enumerate(lengths, 1)
        ]
        batch = Batch.build(requests, PAGE_SIZE)
        with ForwardContext(batch, pool, backend, states):
            runner.forward(batch.input_ids, batch.positions, batch.logits_rows)
    print(json.dumps({"ahead": ahead, "failed": failed, "later": later}))


if __name__ == "__main__":
    main()
