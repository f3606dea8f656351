"""Host time of an engine step: what scheduling, building the batch and sampling cost, next to the model. Writes JSON.

python benchmarks/host_time.py [--requests 8 64 256] [--out benchmarks/results/host_time.json]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from importlib.resources import files
from pathlib import Path

import torch
import transformers

from paged_attn import LLM, SamplingParams


def measure(requests: int, new_tokens: int) -> dict[str, float]:
    """Milliseconds per step over a whole run of `requests` prompts of 16 to 79 bytes, greedy."""
    llm = LLM(files("paged_attn.demo_model"), dtype=torch.float32)
    text = Path(__file__).with_name("host_time.py").read_bytes()
    prompts = [list(text[i : i + 16 + i % 64]) for i in range(requests)]
    llm.generate(prompts[:2], SamplingParams(max_new_tokens=2))
    stats = llm.engine.stats
    steps, model, host = stats.steps, stats.model_seconds, stats.host_seconds
    llm.generate(prompts, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))
    count = stats.steps - steps
    return {
        "requests": requests,
        "steps": count,
        "host_ms_per_step": (stats.host_seconds - host) / count * 1e3,
        "model_ms_per_step": (stats.model_seconds - model) / count * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "host_time.json")
    args = parser.parse_args()
    rows = [measure(count, args.new_tokens) for count in args.requests]
    record = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": "embedded demo model, float32, CPU",
        "rows": rows,
    }
    args.out.write_text(json.dumps(record, indent=2) + "\n")
    for row in rows:
        print(f"{row['requests']:4} requests: host {row['host_ms_per_step']:.3f} ms, model {row['model_ms_per_step']:.3f} ms per step")


if __name__ == "__main__":
    main()
