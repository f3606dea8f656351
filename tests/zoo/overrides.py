"""What `shrink` cannot guess from a name, by model type; `default` holds what the type's config needs to be made at all."""

from __future__ import annotations

from typing import Any

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
ROPES = {SLIDING: ROPE, FULL: {"rope_type": "default", "rope_theta": 1_000.0}}
SHARED_KV: dict[str, Any] = {"layer_types": [SLIDING, FULL, SLIDING, FULL], "num_hidden_layers": 4, "num_kv_shared_layers": 2}
MIXED = {"layer_types": [SLIDING, FULL, SLIDING], "num_hidden_layers": 3}
QWEN4: dict[str, Any] = {
    "ple_layer_ids": [2], "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 2,
    "eos_token_id": 0, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2,
}  # fmt: skip
DOTS3: dict[str, Any] = {
    "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 24, "swa_kv_lora_rank": 24, "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16, "head_dim": 16,
}  # fmt: skip


def _music(decoder: str) -> dict[str, Any]:
    parts = {"text_encoder": "t5", "audio_encoder": "encodec", "decoder": decoder}
    return {"default": {name: {"model_type": kind} for name, kind in parts.items()}, "decoder": {"num_codebooks": 1}}


OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 50, "encoder_hash_byte_group_size": [3, 4], "local_attention_window_len": 8,
        "encoder_config": {"hidden_size_global": 64}, "decoder_config": {"hidden_size_global": 64},
        "global_config": {"hidden_size": 64, "head_dim": 16},
    },
    "cohere_compass_text": {**MIXED, "rope_parameters": {kind: {**rope, "mrope_section": [1, 1, 2]} for kind, rope in ROPES.items()}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "dory": {
        "num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING], "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_layers": 1,
        "rope_parameters": ROPES,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note": {
        "text_config": DOTS3, "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
        "vision_config": {
            "adapter_in_dim": 32, "adapter_out_dim": 32, "default": {"mlp_layer_types": ["dense"] * 3, "num_hidden_layers": 3},
        },
    },
    "dots3_note_text": DOTS3,
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {**SHARED_KV, "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0], "intermediate_size": [48] * 4},
    "gemma4_text": {**SHARED_KV, "global_head_dim": 16},
    "granitemoehybrid": {"layer_types": [LINEAR, FULL, LINEAR], "num_hidden_layers": 3, "position_embedding_type": "rope"},
    "hrm_text": {"num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 1, "embedding_scale": 2.0},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 3},
    "laguna": {"rope_parameters": {FULL: {**ROPE, "partial_rotary_factor": 0.5}, SLIDING: ROPE}, **MIXED,
               "num_attention_heads_per_layer": [4, 8, 4], "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "lfm2": {"layer_types": ["conv", FULL, "conv"], "num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", FULL, "conv"], "num_hidden_layers": 3},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mellum": {**MIXED, "rope_parameters": ROPES},
    "minimax": {"sliding_window": None},
    "ministral": {"head_dim": 8},
    "mllama": {"text_config": {"num_hidden_layers": 4, "cross_attention_layers": [1]}},
    "moshi": {"sliding_window": 256},  # by default as long as its positions: its calls without a cache do not apply it
    "musicgen": _music("musicgen_decoder"),
    "musicgen_melody": _music("musicgen_melody_decoder"),
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "reformer": {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 16], "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8,
                 "num_buckets": 4},
    "xlm": {"causal": True},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},  # its cache rounds head sizes up to a multiple of 64
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"], "num_hidden_layers": 4, "attention_hidden_size": 64},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16,
               "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"], "num_hidden_layers": 4, "n_mamba_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

ASSISTANT = "it drafts for a larger model: its forward needs that model's hidden states and KV"
NOT_STANDALONE: dict[str, str] = {
    "gemma3n": "its vision tower is a timm model, and timm is not installed; gemma3n_text is its language model",
    "gemma4_assistant": ASSISTANT,
    "gemma4_unified_assistant": ASSISTANT,
}
