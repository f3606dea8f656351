"""`python -m tests.gpu.compiled_at_launch MODEL`: starts an engine of a small model and serves some prompts; prints which Triton kernels
of bfloat16 this process compiled itself once the steps' kernels were asked for, Inductor's apart, and how long the engine took."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from triton import knobs

from paged_attn import LLM, SamplingParams
from paged_attn.backends.compiling import compile_ahead
from paged_attn.compiled import rewritten_graph
from tests.compiled.compile_steps import SHAPES, SIZES


def main() -> None:
    compiled: list[tuple[str, str]] = []
    asked_for: list[bool] = []
    ask = rewritten_graph.compile_steps_ahead
    rewritten_graph.compile_steps_ahead = lambda *given: (asked_for.append(True), ask(*given))[1]

    def noted(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not asked_for or cache_hit or "triton_" in src.name:
            return
        if "*bf16" in src.signature.values():  # the self-check may go on in float32
            names = list(src.signature)
            told = {name: kind for name, kind in src.signature.items() if kind != "constexpr"}
            constants = {names[at[0]]: value for at, value in src.constants.items()}
            unaligned = [name for i, name in enumerate(names) if name in told and told[name] != "fp32" and not src.attrs.get((i,))]
            compiled.append((src.name, f"{told} {constants} at no multiple of 16: {unaligned}"))

    kind = sys.argv[1]
    config = AutoConfig.for_model(kind, **(SIZES | SHAPES[kind]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda").eval()
    knobs.compilation.listener = noted
    begun = time.perf_counter()
    llm = LLM(model, kv_memory_gib=2)
    ready = time.perf_counter() - begun
    prompts = [[1 + i % 60 for i in range(length)] for length in (1, 7, 40, 300, 2500)]
    llm.generate(prompts, SamplingParams(max_new_tokens=4, ignore_eos=True), progress=False)
    for prompt in prompts:
        llm.generate([prompt[::-1]], SamplingParams(max_new_tokens=4, ignore_eos=True), progress=False)
    names = {name for name, _ in compiled}
    asked = sorted(f"{kernel.__name__} {told} {constants}" for kernel, told, constants in compile_ahead._asked if kernel.__name__ in names)
    print(json.dumps({"compiled": compiled, "asked": asked, "ready": ready, "parts": llm.engine.start_seconds}))
    llm.close()


if __name__ == "__main__":
    main()
