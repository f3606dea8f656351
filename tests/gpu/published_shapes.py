"""`python -m tests.gpu.published_shapes FAMILY [--tiny] [--layers N]`: layers at the published width with random weights; one JSON line.

float32: greedy tokens through the engine as it is by default (Inductor, graphs, overlap) equal the model's own `generate` and a
loop without a cache. bfloat16, the same weights: logits of the same tokens through the engine are not farther from the float32
model's than transformers' own bfloat16 logits are. With --layers there is no room for float32: whether the model is accepted in
bfloat16, and how far its logits are from transformers'.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from paged_attn import LLM, SamplingParams, UnsupportedError
from paged_attn.tolerances import row_errors
from tests.oracle import greedy
from tests.teacher_forced import by_engine, by_model

LENGTHS = (1, 5, 33, 150, 300)
NEW_TOKENS = 16
TRIES = 4
MOE: dict[str, Any] = {"num_experts_per_tok": 8}
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
MAMBA, ATTENTION = "mamba", "attention"
# Published shapes (config.json of the checkpoint named), four layers that hold every kind of layer.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {  # Llama-3.1-8B
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rope_theta": 500000.0, "max_position_embeddings": 131072,
    },
    "qwen3": {  # Qwen3-8B
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    },
    "gemma2": {  # Gemma-2-9B
        "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256, "max_position_embeddings": 8192,
    },
    "gemma3": {  # Gemma-3-12B's text model
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024, "query_pre_attn_scalar": 256,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING], "max_position_embeddings": 131072,
    },
    "mistral": {  # Mistral-7B-v0.1
        "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 32768,
    },
    "phi3": {  # Phi-3-mini-4k
        "model_type": "phi3", "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32,
        "num_key_value_heads": 32, "sliding_window": 2047, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
        "pad_token_id": 0,
    },
    "gpt_oss": {  # gpt-oss-20b
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": [SLIDING, FULL, SLIDING, FULL], "max_position_embeddings": 131072,
    },
    "qwen3_moe": {  # Qwen3-30B-A3B
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, **MOE, "norm_topk_prob": True,
        "max_position_embeddings": 40960,
    },
    "mixtral": {  # Mixtral-8x7B
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768,
    },
    "deepseek_v2": {  # DeepSeek-V2-Lite
        "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "max_position_embeddings": 4096,
    },
    "glm4_moe": {  # GLM-4.5-Air
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 128, "n_shared_experts": 1, **MOE,
        "first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "max_position_embeddings": 131072,
    },
    "qwen3_next": {  # Qwen3-Next-80B-A3B
        "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
        "num_experts_per_tok": 10, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "layer_types": [LINEAR, LINEAR, LINEAR, FULL], "max_position_embeddings": 262144,
    },
    "falcon_h1": {  # Falcon-H1-7B
        "model_type": "falcon_h1", "vocab_size": 130048, "hidden_size": 3072, "intermediate_size": 12288, "num_attention_heads": 12,
        "num_key_value_heads": 2, "head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256,
        "mamba_n_groups": 1, "mamba_chunk_size": 256, "max_position_embeddings": 262144,
    },
    "bamba": {  # Bamba-9B
        "model_type": "bamba", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "attn_layer_indices": [2], "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_n_groups": 1, "max_position_embeddings": 262144,
    },
    "jamba": {  # Jamba-v0.1
        "model_type": "jamba", "vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2, "attn_layer_period": 4, "attn_layer_offset": 2,
        "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False, "max_position_embeddings": 262144,
    },
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 512, "initializer_range": 0.1, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "head_dim": 16, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
    "original_max_position_embeddings": 512, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "shared_expert_intermediate_size": 48, "query_pre_attn_scalar": 16, "sliding_window": 32,
}  # fmt: skip


def build(family: str, tiny: bool, layers: int = 4, dtype: torch.dtype = torch.float32) -> Any:
    """With weights that bfloat16 holds exactly."""
    published = FAMILIES[family]
    shape = {**published, **{name: value for name, value in TINY.items() if tiny and published.get(name) is not None}}
    if tiny and "kv_lora_rank" in shape:
        shape["num_key_value_heads"] = shape["num_attention_heads"]
    if "layer_types" in shape:
        shape["layer_types"] = (shape["layer_types"] * layers)[:layers]
    config = AutoConfig.for_model(**shape, num_hidden_layers=layers, tie_word_embeddings=False, bos_token_id=1, eos_token_id=None)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(tensor.bfloat16())
    model.generation_config.eos_token_id = None
    return model


def looped(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Greedy tokens without a cache."""
    ids = torch.tensor([prompt], device=next(model.parameters()).device)
    with torch.no_grad():
        for _ in range(new_tokens):
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    tokens: list[int] = ids[0, len(prompt) :].tolist()
    return tokens


def prompts_of(vocabulary: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocabulary, (n,), generator=generator).tolist() for n in LENGTHS]


def settled_prompts(model: Any) -> tuple[list[list[int]], list[list[int]], int]:
    """A prompt of each length with its greedy tokens, by `generate` and by a loop without a cache; how many were passed over, as these
    two disagree: with random weights two experts, or two tokens, may tie to the last bit of float32."""
    prompts, tokens, passed_over = [], [], 0
    candidates = [prompts_of(model.config.get_text_config().vocab_size, seed) for seed in range(3, 3 + TRIES)]
    for each in zip(*candidates, strict=True):
        for prompt in each:
            generated = greedy(model, prompt, NEW_TOKENS)
            if generated == looped(model, prompt, NEW_TOKENS):
                prompts.append(prompt)
                tokens.append(generated)
                break
            passed_over += 1
        else:
            raise RuntimeError(f"generate and a loop without a cache disagree on {TRIES} prompts of {len(each[0])} tokens")
    return prompts, tokens, passed_over


def engine_of(model: Any) -> LLM:
    return LLM(model, page_size=16, num_pages=160, max_batch_tokens=128, max_requests=8, graph_memory_gib=4.0)


def spread(errors: list[Tensor]) -> dict[str, float]:
    joined = torch.cat(errors).sort().values
    return {"median": float(joined.median()), "p90": float(joined[int(0.9 * (len(joined) - 1))]), "worst": float(joined[-1])}


def run(family: str, tiny: bool) -> dict[str, Any]:
    torch.set_float32_matmul_precision("highest")
    report: dict[str, Any] = {"family": family, "tiny": tiny, "torch": torch.__version__}
    started = time.perf_counter()
    model = build(family, tiny)
    prompts, generated, report["passed_over"] = settled_prompts(model)
    report["seconds_oracle"] = round(time.perf_counter() - started, 1)
    started = time.perf_counter()
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    with engine_of(model) as llm:
        report["seconds_fp32_ready"] = round(time.perf_counter() - started, 1)
        served = [[c.token_ids for c in llm.generate(prompts, params)] for _ in ("cold", "warm")]
        report["compiled_by"] = llm.engine.runner.runs_as
        report["capture"] = llm.engine.step_runner.report().lines()[:3]
    report["fp32_equal"] = [[ours == theirs for ours, theirs in zip(each, generated, strict=True)] for each in served]
    sequences = [prompt + tokens for prompt, tokens in zip(prompts, generated, strict=True)]
    exact = by_model(model, sequences, NEW_TOKENS)
    model.to(torch.bfloat16)
    gc.collect()
    theirs = by_model(model, sequences, NEW_TOKENS)
    started = time.perf_counter()
    with engine_of(model) as llm:
        report["seconds_bf16_ready"] = round(time.perf_counter() - started, 1)
        ours = by_engine(llm.engine, sequences, NEW_TOKENS)
    report["bf16_theirs"] = spread([row_errors(one, other) for one, other in zip(exact, theirs, strict=True)])
    report["bf16_ours"] = spread([row_errors(one, other) for one, other in zip(exact, ours, strict=True)])
    report["bf16_apart"] = spread([row_errors(one, other) for one, other in zip(theirs, ours, strict=True)])
    if torch.cuda.is_available():
        report["gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    return report


def run_deep(family: str, tiny: bool, layers: int) -> dict[str, Any]:
    model = build(family, tiny, layers, torch.bfloat16)
    prompts = prompts_of(model.config.get_text_config().vocab_size)
    started = time.perf_counter()
    with engine_of(model) as llm:
        ready = round(time.perf_counter() - started, 1)
        served = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))]
        sequences = [prompt + tokens for prompt, tokens in zip(prompts, served, strict=True)]
        ours = by_engine(llm.engine, sequences, NEW_TOKENS)
        theirs = by_model(model, sequences, NEW_TOKENS)
    apart = spread([row_errors(one, other) for one, other in zip(theirs, ours, strict=True)])
    chosen = [bool((rows.argmax(-1)[:-1].cpu() == torch.tensor(tokens)).all()) for rows, tokens in zip(theirs, served, strict=True)]
    return {"family": family, "layers": layers, "accepted": True, "seconds_bf16_ready": ready, "bf16_apart": apart, "equal": chosen}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--tiny", action="store_true", help="the same configs with small numbers, to try this script on a CPU")
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    try:
        report = run_deep(options.family, options.tiny, options.layers) if options.layers else run(options.family, options.tiny)
    except UnsupportedError as refusal:
        report = {"family": options.family, "refused": str(refusal)[:1500]}
    except Exception:  # noqa: BLE001 - reported, with where
        report = {"family": options.family, "crash": traceback.format_exc()[-3000:]}
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
