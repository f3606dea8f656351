"""Hugging Face's `generate`: its static cache with its default compile, beside `custom_generate=paged_attn.generate` and
`model.compile(backend="paged_attn")`, on one model of Llama-3.1-8B's shape with random weights. Greedy tokens; writes JSON.

python benchmarks/hf_generate.py [--device cuda] [--batch 1 32] [--prompt 512] [--new 128] [--repeat 3] [--out F] [--cpu-smoke]

One prompt of `--prompt` tokens; more are of unequal length, from an eighth of it up to it, padded on the left. Systems run one after the
other in this process; --systems picks some, for a process each. "first" is a call with everything that it makes: compiles, captures, pools.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import paged_attn
from paged_attn import dynamo_backend
from paged_attn.bench.shapes import SHAPES
from paged_attn.bench.systems.model_source import random_model

SYSTEMS = ("static", "custom_generate", "compile")
Generate = Callable[..., torch.Tensor]


def batch_of(rows: int, prompt: int, vocab: int, device: str, number: int) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask [rows, prompt]: the first row whole, the others padded on the left. Another number, other prompts, of
    which no prefix cache knows anything."""
    rng = random.Random(1000 * rows + number)
    lengths = [prompt, *(rng.randint(max(prompt // 8, 1), prompt) for _ in range(rows - 1))]
    ids = torch.zeros(rows, prompt, dtype=torch.int64)
    for row, length in zip(ids, lengths, strict=True):
        row[-length:] = torch.tensor([rng.randrange(1, vocab) for _ in range(length)])
    mask = torch.arange(prompt) >= prompt - torch.tensor(lengths)[:, None]
    return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}


def start(system: str, model: Any, settings: dict[str, Any]) -> Generate:
    """`generate(**batch, max_new_tokens=...)` of a system."""
    asked: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    if system == "static":
        asked["cache_implementation"] = "static"
    if system == "custom_generate":
        asked["custom_generate"] = paged_attn.generate_with(**settings)
    if system == "compile":
        for name, value in settings.items():
            os.environ[f"PAGED_ATTN_{name.upper()}"] = str(value)
        if "paged_attn" not in torch.compiler.list_backends():  # a checkout that is not installed has no entry point
            torch._dynamo.register_backend(dynamo_backend.paged_attn, "paged_attn")
        model.compile(backend="paged_attn")
    return lambda **given: model.generate(**given, **asked)


def stop(system: str, model: Any) -> None:
    """Free what the system kept."""
    if system == "custom_generate" and (llm := paged_attn.engine_of(model)) is not None:
        llm.close()
        vars(model).pop("_paged_attn_engine")
    if system == "compile":
        model._compiled_call_impl = None
    torch._dynamo.reset()
    vars(model).pop("_compiled_call", None)  # transformers keeps its compiled call and the last static cache's length
    vars(model).pop("_previous_max_cache_length", None)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def timed(generate: Generate, batch: dict[str, torch.Tensor], new: int) -> tuple[float, torch.Tensor]:
    """Seconds, and the new tokens on the host."""
    if batch["input_ids"].is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    tokens = generate(**batch, max_new_tokens=new)[:, batch["input_ids"].shape[1] :].cpu()
    return time.perf_counter() - started, tokens


def measure(args: argparse.Namespace, model: Any) -> list[dict[str, Any]]:
    rows, told = [], dict[int, torch.Tensor]()
    vocab = model.config.vocab_size
    for system in args.systems:
        generate = start(system, model, {"kv_memory_gib": args.kv_gib})
        for count in args.batch:
            batches = [batch_of(count, args.prompt, vocab, args.device, number) for number in range(args.repeat + 2)]
            first, tokens = timed(generate, batches[0], args.new)
            timed(generate, batches[1], args.new)
            seconds = [timed(generate, batch, args.new)[0] for batch in batches[2:]]
            best = statistics.median(seconds)
            same = (tokens == told.setdefault(count, tokens)).float().mean().item()
            rows.append({
                "system": system, "batch": count, "prompt": args.prompt, "new": args.new, "first_seconds": first, "seconds": seconds,
                "tokens_per_s": count * args.new / best, "tokens_as_first_system": same,
            })  # fmt: skip
            print(f"{system:16} batch {count:3}: {count * args.new / best:9.1f} tokens/s, first call {first:6.1f} s, "
                  f"{same:.0%} of the tokens as {args.systems[0]}'s", flush=True)  # fmt: skip
        if system == "compile":
            print(paged_attn.explain(model).splitlines()[-1], flush=True)
        stop(system, model)
    for row in rows:
        base = next((r["tokens_per_s"] for r in rows if r["system"] == "static" and r["batch"] == row["batch"]), None)
        row["ratio_to_static"] = None if base is None else row["tokens_per_s"] / base
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--kv-gib", type=float, default=16.0, help="GiB of KV for ours")
    parser.add_argument("--cpu-smoke", action="store_true", help="a tiny float32 model on the CPU, few tokens")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/hf_generate.json"))
    args = parser.parse_args(argv)
    if args.cpu_smoke:
        args.device, args.shape, args.dtype = "cpu", "tiny", "float32"
        args.batch, args.prompt, args.new, args.repeat, args.kv_gib = [1, 4], 48, 12, 2, 0.05
    model = random_model(transformers.AutoConfig.for_model(**SHAPES[args.shape]), args.dtype, args.device)
    model.generation_config.eos_token_id = None
    rows = measure(args, model)
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "CPU"
    record = {
        "date": datetime.date.today().isoformat(), "device": device, "shape": args.shape, "dtype": args.dtype,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "paged_attn": paged_attn.__version__},
        "command": "python benchmarks/hf_generate.py " + " ".join(sys.argv[1:] if argv is None else argv), "rows": rows,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"-> {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
