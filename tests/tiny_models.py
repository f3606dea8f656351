"""Tiny random float32 causal LMs, one per architecture, with the features alive: windows of 8, 4 experts top-2, GQA, softcaps off.

`build(name)` returns a seeded `eval()` model with SDPA attention and a vocabulary of 96 tokens; no file and no network is used.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 96
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
ABSENT = object()  # a common value that this architecture refuses
# For phi3: other rotary frequencies for a whole call once its largest position is beyond 63.
LONG_ROPE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.08, 1.1, 1.1, 1.2]},
    "original_max_position_embeddings": 64,
}
# Two layers that are of as many kinds as three.
OF_TWO_LAYERS: dict[str, dict[str, Any]] = {"gpt2": {"n_layer": 2}, "llama4_text": {"no_rope_layers": [1, 0]}}
MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "phi3": {"sliding_window": 8, "original_max_position_embeddings": 256},
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False, "head_dim": ABSENT},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.25, "logits_scaling": 4.0, "residual_multiplier": 0.5},
    "cohere2": {"sliding_window": 8, "sliding_window_pattern": 2},
    "mixtral": MOE,
    "qwen3_moe": {**MOE, "moe_intermediate_size": 24},
    "llama4_text": {
        **MOE, "intermediate_size_mlp": 48, "attention_chunk_size": 8, "no_rope_layers": [1, 1, 0], "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 1, "attn_temperature_tuning": True, "floor_scale": 8,
    },
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24,
        "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    },
    "starcoder2": {"sliding_window": 8},
    "stablelm": {},
}  # fmt: skip


def config_for(name: str, **overrides: Any) -> Any:
    values = {**COMMON, **ARCHITECTURES[name], **overrides}
    return AutoConfig.for_model(name, **{key: value for key, value in values.items() if value is not ABSENT})


def build(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_for(name, **overrides), dtype=dtype)
    if name == "deepseek_v3":  # its routing correction bias starts at zero; make it matter
        for module in model.modules():
            if hasattr(module, "e_score_correction_bias"):
                module.e_score_correction_bias.copy_(torch.randn_like(module.e_score_correction_bias) * 0.1)
    return model.eval()


def build_short(name: str, **overrides: Any) -> PreTrainedModel:
    """`build` with two layers instead of three, a first and a last one of each kind: for tests that trace anew, or check on numbers again
    and again, which takes as long as there are layers. Pieces that layers share, and layers in the middle, are with `build`."""
    return build(name, **{"num_hidden_layers": 2, **OF_TWO_LAYERS.get(name, {}), **overrides})
