"""One model over several processes, each with its own heads.

torchrun --nproc-per-node 2 examples/tensor_parallel.py [MODEL] [--check]

Every process runs this same program: the same settings, the same prompts. Without a MODEL it is the embedded one, loaded whole in each
process and then cut; a MODEL is read in shards by transformers, which needs accelerate. Without torchrun it runs whole, in one process.
"""

from __future__ import annotations

import os
import sys
from importlib.resources import files
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from paged_attn import LLM, SamplingParams
from paged_attn.parallel.shard import shard
from paged_attn.parallel.torchrun import join, leave

PROMPTS = ["It was", "Mr. Knightley had never before seen her", "Her sister, who"]
PARAMS = SamplingParams(max_new_tokens=24)


def start() -> torch.device:
    """Join the group that torchrun has made room for; the device of this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return join(device) if "RANK" in os.environ else device


def load(path: str | None, device: torch.device) -> tuple[Any, Any]:
    """(this process's part of the model, its tokenizer)"""
    name = path or str(files("paged_attn.demo_model"))
    tokenizer = AutoTokenizer.from_pretrained(name)
    if path is not None and dist.is_initialized():
        from transformers.distributed import DistributedConfig

        return AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(tp_plan="auto")).eval(), tokenizer
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32 if path is None else "auto").eval()
    return (shard(model, device) if dist.is_initialized() else model.to(device)), tokenizer


def main(arguments: list[str] | None = None) -> list[str]:
    given = [] if arguments is None else arguments
    path = next((argument for argument in given if not argument.startswith("-")), None)
    device = start()
    model, tokenizer = load(path, device)
    with LLM(model, tokenizer=tokenizer) as llm:
        texts = [completion.text for completion in llm.generate(PROMPTS, PARAMS)]
        heads = llm.engine.runner.layers[0]
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{ranks} processes, in each {heads.num_q_heads} query heads over {heads.num_kv_heads} KV heads")
        print(*(f"{prompt!r} -> {text!r}" for prompt, text in zip(PROMPTS, texts, strict=True)), sep="\n")
    if "--check" in given:
        whole = AutoModelForCausalLM.from_pretrained(path or str(files("paged_attn.demo_model")), dtype=model.dtype).to(device)
        with LLM(whole, tokenizer=tokenizer) as llm:
            assert texts == [completion.text for completion in llm.generate(PROMPTS, PARAMS)], "the whole model says something else"
        print("every token is the whole model's")
    leave()
    return texts


if __name__ == "__main__":
    main(sys.argv[1:])
