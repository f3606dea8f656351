"""Where a decode step's time goes: milliseconds of a step by number of requests, and what each kernel takes of it.

    python benchmarks/step_profile.py deepseek-v2-lite:14 --requests 1,8,32 --json out.json
    python benchmarks/step_profile.py deepseek-v2-lite:14 --set disable_passes=complex_as_real

A shape of `paged-attn bench`, whole or its first layers; random bf16 weights. A step's milliseconds are wall time, without the profiler;
a kernel's are torch's profiler's, which slows a step down, so that only their parts of the sum say something.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from paged_attn import LLM, SamplingParams
from paged_attn.bench.systems.job import ModelSource
from paged_attn.bench.systems.model_source import load, write_shape
from paged_attn.bench.workloads import Workload
from paged_attn.engine.config import EngineConfig

SHOWN = 40


def seconds(llm: LLM, prompts: list[list[int]], new: int) -> float:
    llm.clear_prefix_cache()
    started = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_new_tokens=new, ignore_eos=True), progress=False)
    return time.perf_counter() - started


def step_ms(llm: LLM, prompts: list[list[int]], steps: int) -> float:
    """Of the faster of two pairs of runs, one of which decodes `steps` tokens more."""
    seconds(llm, prompts, 4)
    return min(seconds(llm, prompts, 4 + steps) - seconds(llm, prompts, 4) for _ in range(2)) / steps * 1000


def kernels(llm: LLM, prompts: list[list[int]], steps: int) -> dict[str, tuple[float, float]]:
    """Kernel -> launches and microseconds a step; those of the prompts are counted in a run of their own and taken off."""
    more, less = _counted(llm, prompts, 4 + steps), _counted(llm, prompts, 4)
    return {name: ((more[name][0] - less[name][0]) / steps, (more[name][1] - less[name][1]) / steps) for name in more}


def _counted(llm: LLM, prompts: list[list[int]], new: int) -> dict[str, tuple[int, float]]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        seconds(llm, prompts, new)
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in profiler.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.key] = (found[event.key][0] + event.count, found[event.key][1] + event.self_device_time_total)
    return found


def measure(shape: str, layers: int | None, requests: list[int], prompt: int, steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = load(ModelSource(write_shape(shape, "bfloat16", Path(folder), layers), True, "bfloat16", "cuda"))
    found: dict[str, Any] = {"shape": shape, "layers": layers, "settings": settings, "device": torch.cuda.get_device_name()}
    with LLM(model, config=EngineConfig.from_environment(generation_config="ours", **settings)) as llm:
        found["start_seconds"] = dict(llm.engine.start_seconds)
        found["backends"] = llm.engine.selection.describe()
        found["graphs"] = [line.strip() for line in llm.engine.step_runner.report().lines()]
        for count in requests:
            prompts = Workload("profile", count, prompt, prompt, steps).prompts(model.config.vocab_size, 0)
            ms, by_kernel = step_ms(llm, prompts, steps), kernels(llm, prompts, min(steps, 16))
            largest = sorted(by_kernel.items(), key=lambda item: -item[1][1])
            found[str(count)] = {"ms": ms, "kernels": largest, "us": sum(us for _, us in by_kernel.values())}
            print(f"{shape}:{layers} {settings}, {count} requests: {ms:.3f} ms a step, {found[str(count)]['us'] / 1000:.3f} in kernels")
            for name, (launches, us) in largest[:SHOWN]:
                print(f"  {us:9.1f} us {launches:7.1f} x  {name[:120]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", help="SHAPE or SHAPE:LAYERS")
    parser.add_argument("--requests", default="1,8,32")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--set", action="append", default=[], help="a setting of the engine, name=value; commas make a tuple")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    settings: dict[str, Any] = {}
    for item in asked.set:
        name, _, value = item.partition("=")
        settings[name] = tuple(value.split(",")) if name == "disable_passes" else json.loads(value)
    found = []
    for shape in asked.shapes:
        name, _, layers = shape.partition(":")
        requests = [int(count) for count in asked.requests.split(",")]
        found.append(measure(name, int(layers) if layers else None, requests, asked.prompt, asked.steps, settings))
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        if asked.json is not None:
            asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
