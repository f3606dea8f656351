"""Experts over several GPUs beside the whole model: its tokens in float32, cut by width and shared out; and how long steps take.

torchrun --standalone --nproc-per-node 2 -m tests.gpu.expert_parallel           tokens; with names of MODELS behind it, of those
torchrun --standalone --nproc-per-node 2 -m tests.gpu.expert_parallel --speed   milliseconds of 12 layers of Qwen3-30B-A3B's shape, bf16
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.parallel.shard import shard
from paged_attn.parallel.torchrun import join, leave
from tests.oracle import greedy, random_prompts
from tests.zoo.build import build

MODELS = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3")
WAYS = ("slices", "experts", "experts, attention whole")
PROMPTS = random_prompts((1, 5, 17, 33, 70, 2, 9))
SHAPE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 12, "vocab_size": 151936,
    "max_position_embeddings": 8192, "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip


def shared_out(model: Any, device: torch.device, way: str) -> Any:
    if way == "experts, attention whole":
        model.tp_plan = {}
    return shard(model, device, expert_parallel=way != "slices")


def say(*words: object) -> None:
    if dist.get_rank() == 0:
        print(*words, flush=True)


def tokens(device: torch.device, names: Sequence[str] = MODELS) -> None:
    """Raises AssertionError where a rank's tokens are not the whole model's, a layer is not the op, or decodes are not full graphs."""
    torch.set_float32_matmul_precision("highest")
    for name in names:
        whole = build(name).to(device)
        expected = [greedy(whole, prompt, 16) for prompt in PROMPTS]
        for way in WAYS:
            torch._dynamo.reset()
            model = shared_out(build(name), device, way)
            with LLM(model, num_pages=256, page_size=16, max_requests=5, max_batch_tokens=24, graph_decode_sizes=3) as llm:
                got = [[c.token_ids for c in llm.generate(PROMPTS, SamplingParams(max_new_tokens=16, ignore_eos=True))] for _ in range(2)]
                ops = sum(node.target is EXPERTS for node in llm.engine.runner.compiled.rewrite.gm.graph.nodes)
                graphs = llm.engine.step_runner.graphs
                full = 0 if graphs is None else sum(str(key).startswith("full") for key in graphs.captured)
                backend = llm.engine.runner.compiled.rewrite.experts
            assert got == [expected] * 2, f"rank {dist.get_rank()}: {name}, {way}: other tokens than the whole model's"
            assert ops and (full or device.type == "cpu"), f"{name}, {way}: {ops} layers of experts are ops, {full} full graphs"
            say(f"{name}, {way}: the whole model's tokens; {ops} layers are ops by {backend}, {full} full graphs")


def speed(device: torch.device) -> None:
    config = AutoConfig.for_model("qwen3_moe", **SHAPE)
    for way in ("one GPU", *WAYS):
        torch.manual_seed(0)
        torch._dynamo.reset()
        with torch.device(device):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        model = model if way == "one GPU" else shared_out(model, device, way)
        torch.cuda.empty_cache()
        with LLM(model, max_requests=128, prefix_cache=False) as llm:
            say(f"{way}: decode with 1, 32, 128 requests of 512 tokens {decode_ms(llm)} ms; a prompt of 2048 {prompt_ms(llm):.2f} ms")
        del model, llm
        gc.collect()  # an engine's pool, which lies in cycles, is as large as the next model and its pool
        dist.barrier()


def decode_ms(llm: LLM) -> list[float]:
    found = []
    for requests in (1, 32, 128):
        prompts = random_prompts((512,) * requests)
        times = [seconds_of(llm, prompts, new) for new in (9, 73, 9, 73)]  # the first two warm up
        found.append(round((times[3] - times[2]) / 64 * 1000, 2))
    return found


def prompt_ms(llm: LLM) -> float:
    prompts = random_prompts((2048,))
    return min(seconds_of(llm, prompts, 1) for _ in range(5)) * 1000


def seconds_of(llm: LLM, prompts: list[list[int]], new: int) -> float:
    torch.cuda.synchronize()
    dist.barrier()
    started = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_new_tokens=new, ignore_eos=True))
    torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    here = join(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if "--speed" in sys.argv:
        speed(here)
    else:
        tokens(here, sys.argv[1:] or MODELS)
    gc.collect()  # NCCL's end waits for captured graphs that hold its launches
    leave()
