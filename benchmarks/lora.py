"""Decoding with adapters: tokens per second of a batch without any, and with 8 of rank 16 shared among its requests; vLLM beside them.

python benchmarks/lora.py [--shape llama-3.1-8b] [--layers 32] [--batch 1 8 64] [--adapters 8] [--rank 16] [--prompt 256] [--new 128]
    [--peers] [--out F]

Random weights of a known shape, random adapters of peft's format for all linear layers. Each system runs in a process of its own, one after
the other; `--cpu-smoke` runs ours alone on a tiny model, to see that this file works. The aim: at most 15 % slower with than without.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paged_attn.bench.shapes import SHAPES
from paged_attn.bench.systems.model_source import ModelSource, load, save_weights, write_shape

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Generate = Callable[[list[list[int]], list[str | None], int], int]


def write_adapters(model: str, rank: int, count: int, folder: Path) -> dict[str, str]:
    """Folders of random adapters as peft's `save_pretrained` writes them, by name."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).named_modules()
    shapes = {path: tuple(module.weight.shape) for path, module in layers if path.rpartition(".")[2] in TARGETS}
    found = {}
    for number in range(count):
        path = folder / f"adapter-{number}"
        path.mkdir()
        settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(TARGETS)}
        (path / "adapter_config.json").write_text(json.dumps(settings | {"bias": "none", "base_model_name_or_path": model}))
        weights = {}
        for module, (outputs, inputs) in shapes.items():
            weights[f"base_model.model.{module}.lora_A.weight"] = (torch.randn(rank, inputs) * inputs**-0.5).bfloat16()
            weights[f"base_model.model.{module}.lora_B.weight"] = (torch.randn(outputs, rank) * 0.01).bfloat16()
        save_file(weights, path / "adapter_model.safetensors")
        found[path.name] = str(path)
    return found


def ours(model: str, device: str, adapters: dict[str, str], rank: int, longest: int) -> Generate:
    from paged_attn import LLM, SamplingParams

    dtype = "bfloat16" if device == "cuda" else "float32"
    settings = {"max_loras": len(adapters), "max_lora_rank": rank, "prefix_cache": False}
    llm = LLM(load(ModelSource(model, False, dtype, device)), **settings)
    for name, folder in adapters.items():
        llm.load_lora(name, folder)

    def generate(prompts: list[list[int]], which: list[str | None], new: int) -> int:
        completions = llm.generate(prompts, SamplingParams(max_new_tokens=new, ignore_eos=True), lora=which, progress=False)
        return sum(len(completion.token_ids) for completion in completions)

    return generate


def vllm(model: str, device: str, adapters: dict[str, str], rank: int, longest: int) -> Generate:
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=model, dtype="bfloat16", skip_tokenizer_init=True, enable_lora=True, max_loras=len(adapters), max_lora_rank=rank,
        max_model_len=longest, enable_prefix_caching=False, seed=0,
    )  # fmt: skip
    known = {name: LoRARequest(name, number, folder) for number, (name, folder) in enumerate(adapters.items(), 1)}

    def generate(prompts: list[list[int]], which: list[str | None], new: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        asked = [None if name is None else known[name] for name in which]
        outputs = llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params, lora_request=asked, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


SYSTEMS = {"paged_attn": ours, "vllm": vllm}


def run(system: str, model: str, device: str, adapters: dict[str, str], options: argparse.Namespace, results: Any) -> None:
    """One row for each size of batch: the median of tokens per second without and with adapters, in turn."""
    generate = SYSTEMS[system](model, device, adapters, options.rank, options.prompt + options.new)
    vocabulary, rng = json.loads((Path(model) / "config.json").read_text())["vocab_size"], random.Random(0)
    for batch in options.batch:
        rates: dict[str, list[float]] = {"without": [], "with": []}
        names = list(adapters)
        kinds: dict[str, list[str | None]] = {"without": [None] * batch, "with": [names[row % len(names)] for row in range(batch)]}
        for turn in range(options.repeat + 1):
            for kind, which in kinds.items():
                prompts = [[rng.randrange(1, vocabulary) for _ in range(options.prompt)] for _ in range(batch)]
                started = time.perf_counter()
                tokens = generate(prompts, which, options.new)
                if turn:  # the first one warms up
                    rates[kind].append(tokens / (time.perf_counter() - started))
        without, having = (statistics.median(rates[kind]) for kind in ("without", "with"))
        row = {"system": system, "batch": batch, "without": round(without, 1), "with": round(having, 1)}
        results.put({**row, "slower_percent": round(100 * (without / having - 1), 1)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="of the shape, the first ones (default: all)")
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 64])
    for name, default in (("adapters", 8), ("rank", 16), ("prompt", 256), ("new", 128), ("repeat", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--peers", action="store_true", help="vLLM, too, where it is installed")
    parser.add_argument("--cpu-smoke", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    context, rows = multiprocessing.get_context("spawn"), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        device, dtype = ("cpu", "float32") if options.cpu_smoke else ("cuda", "bfloat16")
        if options.cpu_smoke:
            options.shape, options.batch, options.prompt, options.new, options.repeat = "tiny", [4], 16, 8, 1
        model = write_shape(options.shape, dtype, Path(folder) / "model", options.layers)
        save_weights(ModelSource(model, True, dtype, device), Path(model))
        adapters = write_adapters(model, options.rank, options.adapters, Path(folder))
        for system in ("paged_attn", *(["vllm"] if options.peers else [])):
            results = context.SimpleQueue()
            process = context.Process(target=run, args=(system, model, device, adapters, options, results))
            process.start()
            process.join()
            while not results.empty():
                rows.append(results.get())
                print(json.dumps(rows[-1]), flush=True)
            if process.exitcode != 0:
                raise SystemExit(f"{system} ended with status {process.exitcode}")
    if options.out is not None:
        options.out.write_text(json.dumps({"options": {k: str(v) for k, v in vars(options).items()}, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
