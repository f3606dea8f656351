"""Small values for a config's attributes, chosen by their names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

VOCAB = 96
LAYERS = 3
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, EXPERT_MLP, EXPERTS, WINDOW = 32, 4, 2, 8, 48, 24, 4, 8


def _table(*rows: tuple[Any, str]) -> dict[str, Any]:
    return {name: value for value, names in rows for name in names.split()}


LAYER_COUNTS = (
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers num_blocks"
).split()
ALWAYS = _table(  # set also where the default is None
    (KV_HEADS, "num_key_value_heads num_kv_heads swa_num_key_value_heads"),
    (WINDOW, "sliding_window sliding_window_size attention_window_size window_size keep_window_size index_topk"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts"),
    (VOCAB, "vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
    (True, "is_decoder use_sliding_window scale_embedding"),
    (False, "tie_word_embeddings"),  # tied, a tiny model mostly repeats its last token
)  # fmt: skip
NEVER = {"bos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 1, "sep_token_id": 2, "cls_token_id": 1} | dict.fromkeys(
    "eos_token_id forced_eos_token_id forced_bos_token_id suppress_tokens begin_suppress_tokens".split()
)
IF_SET = _table(  # keep None, which means "derived" or "absent"
    (HIDDEN, "hidden_size d_model n_embd emb_dim embedding_size embedding_dim word_embed_proj_dim input_embedding_size "
             "output_embedding_size attention_hidden_size lru_width backbone_hidden_size pronunciation_embed_dim shape_embed_dim "
             "cross_attention_hidden_size dim dim_model_base"),
    (MLP, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff n_inner dim_ff ffn_hidden_size dense_intermediate_size d_inner "
         "feed_forward_size intermediate_size_mlp prefix_dense_intermediate_size"),
    (EXPERT_MLP, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size "
                "moe_shared_expert_intermediate_size shared_experts_intermediate_size"),
    (EXPERTS, "num_experts num_local_experts n_routed_experts moe_num_experts moe_num_primary_experts"),
    (HEADS, "num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads num_heads attention_heads "
           "swa_num_attention_heads num_decoder_attention_heads num_encoder_attention_heads linear_num_heads linear_num_value_heads "
           "heads_per_ngram"),
    (HEAD_DIM, "head_dim swa_head_dim kv_channels dim_head d_head attention_head_size attention_head_dim linear_head_dim "
               "linear_key_head_dim linear_value_head_dim index_head_dim qk_rope_head_dim d_rel mamba_d_state state_size ssm_state_size "
               "mamba_d_head mamba_head_dim hidden_size_per_layer_input laurel_rank ple_embed_dim rotary_dim query_pre_attn_scalar "
               "gated_norm_rank hc_lowrank router_hidden_size time_step_rank mamba_dt_rank o_lora_rank moe_latent_size adapter_rank"),
    (16, "index_n_heads kv_lora_rank qk_nope_head_dim v_head_dim chunk_size mamba_chunk_size block_size local_attention n_mel_channels"),
    (24, "q_lora_rank"),
    (256, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length max_target_positions max_source_positions context_length "
         "original_max_position_embeddings rel_extent"),
    (2, "linear_num_key_heads n_group num_expert_group num_query_groups o_groups mamba_n_groups mamba_ngroups n_groups "
       "type_vocab_size"),
    (8, "floor_scale attention_chunk_size mamba_n_heads mamba_num_heads num_codebooks"),
    (1, "topk_group first_k_dense_replace num_dense_layers max_window_layers n_shared_experts "
       "num_shared_experts moe_num_shared_experts depth"),
    (2.0, "attn_logit_softcapping"),
    (0.2, "initializer_range init_std initializer_factor"),
)  # fmt: skip


def kinds_of_layers(lists: Iterable[list[Any]], at_least: int = LAYERS) -> list[int]:
    """Indices of layers, in order, that hold every value of every per-layer list: the first layers, and the first of each other kind."""
    rows = list(zip(*lists, strict=True))
    seen: list[set[Any]] = [set() for _ in rows[0]]
    chosen = []
    for index, row in enumerate(rows):
        if any(value not in kinds for value, kinds in zip(row, seen, strict=True)):
            chosen.append(index)
            for value, kinds in zip(row, seen, strict=True):
                kinds.add(value)
    more = [index for index in range(len(rows)) if index not in chosen]
    return sorted(chosen + more[: max(0, at_least - len(chosen))])


def per_layer_lists(values: dict[str, Any], layers: int) -> dict[str, list[Any]]:
    """The attributes that hold one kind for each layer; not the lists of layer numbers (`[0, 1, 2, ...]`)."""
    lists = {name: list(value) for name, value in values.items() if isinstance(value, (list, tuple)) and len(value) == layers > 1}
    return {name: value for name, value in lists.items() if value != list(range(layers))}


def small_values(values: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
    """Constructor arguments that make a config with these attributes small; `fixed` wins.

    Attributes that are not named here are left out, so that the config derives them again from the small ones.
    """
    small = {name: ALWAYS[name] for name in ALWAYS if name in values}
    small |= {name: NEVER[name] for name in NEVER if name in values}
    for name, value in IF_SET.items():
        if isinstance(values.get(name), (int, float)) and values[name] is not True and values[name] > 0:
            small[name] = value
    if "kv_lora_rank" in values:  # latent attention has a key for every head
        small["num_key_value_heads"] = HEADS
    if "local_attention" in values:
        small.pop("sliding_window", None)
    counts = [name for name in LAYER_COUNTS if name in values]
    lists = per_layer_lists(values, values[counts[0]]) if counts else {}
    if "use_sliding_window" in values:  # its layer_types follow from max_window_layers
        lists.pop("layer_types", None)
    layers = next((fixed[name] for name in counts if name in fixed), None)
    if lists and layers is None:
        indices = kinds_of_layers(lists.values())
        layers = len(indices)
        for name, value in lists.items():
            small[name] = [IF_SET.get(name, value[index]) for index in indices]
    return small | {name: layers or LAYERS for name in counts} | fixed
