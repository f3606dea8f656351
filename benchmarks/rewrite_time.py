"""Seconds from a Dynamo graph of 32 layers to the proved, rewritten one, by kind of attention; writes JSON with its conditions.

python benchmarks/rewrite_time.py [--layers 32] [--out benchmarks/results/rewrite_time.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from paged_attn.compiled.options import CompileOptions
from paged_attn.engine.tracing.trace_model import trace_model

# Attention of real shape (heads, windows), little else: the width of a model does not change its graph.
COMMON = {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 64, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 8,
    "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
CASES = {
    "llama, F.sdpa": ("llama", {}, "sdpa"),
    "llama, written out": ("llama", {}, "eager"),
    "gemma2: softcap, windows": ("gemma2", {"sliding_window": 2048}, "eager"),
    "gpt_oss: sinks, windows": ("gpt_oss", {"sliding_window": 128, "num_local_experts": 2, "num_experts_per_tok": 1}, "eager"),
    "bloom: ALiBi": ("bloom", {"n_head": 32}, "eager"),
    "gpt2: stored positions": ("gpt2", {"n_embd": 256, "n_head": 32, "n_positions": 1024}, "eager"),
}


def measure(kind: str, changes: dict[str, object], implementation: str, layers: int) -> dict[str, object]:
    depth = {"num_hidden_layers": layers, "n_layer": layers} if kind in ("bloom", "gpt2") else {"num_hidden_layers": layers}
    config = AutoConfig.for_model(kind, **{**COMMON, **changes, **depth})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    started = time.perf_counter()
    compiled, _ = trace_model(model, CompileOptions(inductor=False))
    rewrite = compiled.rewrite
    assert len(rewrite.layers) == layers, f"{kind}: {len(rewrite.layers)} of {layers} layers; {rewrite.not_paged}"
    return {
        "rewrite_seconds": round(sum(rewrite.seconds.values()), 3), "passes": {k: round(v, 3) for k, v in rewrite.seconds.items()},
        "trace_and_rewrite_seconds": round(time.perf_counter() - started, 2), "nodes": rewrite.nodes_before,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rewrite_time.json"))
    arguments = parser.parse_args()
    results = {}
    for name, case in CASES.items():
        results[name] = measure(*case, arguments.layers)
        print(f"{name:28} {results[name]['rewrite_seconds']:>7} s  {results[name]['passes']}", flush=True)
    conditions = {
        "layers": arguments.layers, "torch": torch.__version__, "transformers": transformers.__version__, "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(), "load_average": os.getloadavg()[0], "machine": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"conditions": conditions, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
