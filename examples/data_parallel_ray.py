"""Copies of a model on several devices, each with an engine of its own; Ray starts them and shares out the work.

A table of prompts (pip install 'ray[data]'):   python examples/data_parallel_ray.py [MODEL] [--copies 2] [--gpus 1]
A service (pip install 'ray[serve]'):           serve run examples.data_parallel_ray:service model=MODEL copies=2 gpus=1
                                                curl -d '{"prompt": "It was", "max_new_tokens": 24}' localhost:8000
"""

from __future__ import annotations

import argparse
import asyncio
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any

from paged_attn import LLM, SamplingParams

EMBEDDED = str(files("paged_attn.demo_model"))
PROMPTS = ["It was", "Mr. Knightley had never before seen her", "Her sister, who", "She had"]
AT_ONCE = 256  # requests that one copy takes before Ray gives them to another


class Batches:
    """One copy, for Ray Data: a batch of rows in, the same with their texts out."""

    def __init__(self, model: str, device: str, new_tokens: int = 24) -> None:
        self.llm = LLM(model, device=device)
        self.params = SamplingParams(max_new_tokens=new_tokens)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        completions = self.llm.generate(list(batch["prompt"]), self.params)
        return {**batch, "text": [completion.text for completion in completions]}


class Requests:
    """One copy, for Ray Serve: each request waits in a thread of its own, and the engine runs them as one continuous batch."""

    def __init__(self, model: str, device: str) -> None:
        self.llm, self.threads = LLM(model, device=device), ThreadPoolExecutor(AT_ONCE)

    async def __call__(self, request: Any) -> dict[str, Any]:
        body = await request.json()
        params = SamplingParams(max_new_tokens=int(body.get("max_new_tokens", 16)))
        (done,) = await asyncio.get_running_loop().run_in_executor(self.threads, self.llm.generate, str(body["prompt"]), params)
        return {"text": done.text, "finish_reason": done.finish_reason, "cached_tokens": done.cached_tokens}


def complete_table(prompts: list[str], model: str, copies: int, gpus: float) -> list[dict[str, Any]]:
    import ray.data

    table = ray.data.from_items([{"prompt": prompt} for prompt in prompts])
    arguments = (model, "cuda" if gpus else "cpu")  # Ray shows each copy only the GPU that it gave it
    done = table.map_batches(Batches, fn_constructor_args=arguments, concurrency=copies, num_gpus=gpus, batch_size=1024)
    return list(done.take_all())


def service(arguments: dict[str, str]) -> Any:
    """What `serve run` starts."""
    from ray import serve

    gpus, copies = float(arguments.get("gpus", 0)), int(arguments.get("copies", 2))
    deploy = serve.deployment(num_replicas=copies, max_ongoing_requests=AT_ONCE, ray_actor_options={"num_gpus": gpus})
    return deploy(Requests).bind(arguments.get("model", EMBEDDED), "cuda" if gpus else "cpu")


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=EMBEDDED)
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="for each copy")
    given = parser.parse_args(arguments)
    rows = complete_table(PROMPTS, **vars(given))
    print(*(f"{row['prompt']!r} -> {row['text']!r}" for row in rows), sep="\n")
    return rows


if __name__ == "__main__":
    main()
