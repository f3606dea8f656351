"""Tiny random float32 models with recurrent state: gated delta rule, Mamba, Mamba-2, short convolution, alone and beside attention.

Chunks of the models' own are 8 tokens long, so that prompts cross them. Parameters that are zero at first are moved.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.tiny_models import COMMON

LINEAR, FULL = "linear_attention", "full_attention"
DELTA: dict[str, Any] = {
    "layer_types": [LINEAR, FULL, LINEAR], "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, "mlp_only_layers": [0, 1, 2], "num_experts": 4},
    "falcon_h1": MAMBA2,
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "lfm2": {"layer_types": ["conv", FULL, "conv"], "conv_L_cache": 3, "block_ff_dim": 48},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 50, "expert_layer_offset": 49, "mamba_d_state": 8,
        "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "mamba": {"state_size": 8, "conv_kernel": 4, "expand": 2, "time_step_rank": 4},
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1, "conv_kernel": 4, "chunk_size": 8},
}  # fmt: skip


@functools.cache
def recurrent(name: str, seed: int = 0) -> PreTrainedModel:
    """One seeded model in evaluation mode per name and process; nobody may change it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name, **{**COMMON, "tie_word_embeddings": False, **RECURRENT[name]}), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and not parameter.any():
                parameter.normal_(0, 0.2)
    return model.eval()


def without_cache(model: PreTrainedModel, prompt: list[int], new: int) -> list[int]:
    """Greedy new tokens of one prompt, every one from a call on all tokens before it."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(new):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]
