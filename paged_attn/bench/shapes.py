"""Configs of published models, with the widths of their model cards, for random weights. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_LLAMA = {
    "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 16_384,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA,
    "tiny": {
        **_LLAMA, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 2048,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 40_960, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "sliding_window": 128, "layer_types": [_SLIDING, _FULL] * 12, "max_position_embeddings": 131_072, "tie_word_embeddings": False,
    },
    "deepseek-v2-lite": {  # vLLM refuses it without groups
        "model_type": "deepseek_v2", "vocab_size": 102_400, "hidden_size": 2048, "intermediate_size": 10_944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "first_k_dense_replace": 1,
        "max_position_embeddings": 32_768, "tie_word_embeddings": False,
    },
    "qwen3-next-16l": {  # 16 of its 48 layers
        "model_type": "qwen3_next", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL] * 4,
        "max_position_embeddings": 262_144, "tie_word_embeddings": False,
    },
    "gemma-3-12b": {
        "model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 3840, "intermediate_size": 15_360, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024, "query_pre_attn_scalar": 256,
        "layer_types": ([_SLIDING] * 5 + [_FULL]) * 8, "max_position_embeddings": 131_072,
    },
    "bamba-9b": {
        "model_type": "bamba", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_n_groups": 1, "max_position_embeddings": 262_144, "tie_word_embeddings": False,
    },
    "falcon-h1-7b": {
        "model_type": "falcon_h1", "vocab_size": 130_048, "hidden_size": 3072, "intermediate_size": 12_288, "num_hidden_layers": 44,
        "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128,
        "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_rms_norm": False, "max_position_embeddings": 262_144,
        "tie_word_embeddings": False,
    },
    "nemotron-h-8b": {
        "model_type": "nemotron_h", "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 21_504, "num_hidden_layers": 52,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "num_attention_heads": 32, "head_dim": 128,
        "num_key_value_heads": 8, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
        "max_position_embeddings": 8192, "tie_word_embeddings": False,
    },
    "lfm2-8b-a1b": {
        "model_type": "lfm2_moe", "vocab_size": 65_536, "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
        "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 32, "num_experts_per_tok": 4,
        "num_dense_layers": 2, "layer_types": [_FULL if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
        "max_position_embeddings": 128_000, "tie_word_embeddings": True,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 32_768, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": False,
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe", "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 10_944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True,
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
        "max_position_embeddings": 131_072, "tie_word_embeddings": False,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
        "max_position_embeddings": 32_768, "tie_word_embeddings": False,
    },
    "kimi-linear-48b-a3b": {
        "model_type": "kimi_linear", "vocab_size": 163_840, "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
        "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_local_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "routed_scaling_factor": 2.446, "mlp_layer_types": ["dense"] + ["sparse"] * 26,
        "layer_types": [_FULL if layer in (3, 7, 11, 15, 19, 23, 26) else _LINEAR for layer in range(27)],
        "linear_head_dim": 128, "linear_num_heads": 32, "max_position_embeddings": 131_072, "tie_word_embeddings": False,
    },
    "granite-4-h-small": {
        "model_type": "granitemoehybrid", "vocab_size": 100_352, "hidden_size": 4096, "intermediate_size": 768,
        "shared_intermediate_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_local_experts": 72, "num_experts_per_tok": 10, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128,
        "layer_types": [_FULL if layer % 10 == 5 else "mamba" for layer in range(40)], "position_embedding_type": "nope",
        "embedding_multiplier": 12, "logits_scaling": 16, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125,
        "max_position_embeddings": 131_072, "tie_word_embeddings": True,
    },
    "llama-4-scout": {
        "model_type": "llama4_text", "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16,
        "num_experts_per_tok": 1, "attention_chunk_size": 8192, "max_position_embeddings": 131_072, "tie_word_embeddings": False,
    },
}  # fmt: skip
SHAPE_NAMES = tuple(SHAPES)


def shape_config(shape: str, layers: int | None = None) -> dict[str, Any]:
    """A shape's config, whole or of its first `layers` layers; what stands there once for each layer is cut, too. Raises ValueError: the
    shape has fewer layers."""
    settings = SHAPES[shape]
    whole = settings["num_hidden_layers"]
    if layers is None:
        return settings
    if not 1 <= layers <= whole:
        raise ValueError(f"--layers is {layers}; {shape} has {whole}, and 1 to {whole} are allowed")
    found = {name: value[:layers] if isinstance(value, (list, str)) and len(value) == whole else value for name, value in settings.items()}
    if (rows := settings.get("attn_layer_indices")) is not None:
        found["attn_layer_indices"] = [layer for layer in rows if layer < layers]
    return {**found, "num_hidden_layers": layers}
